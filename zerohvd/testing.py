"""Many ranks in one process: what a parallel program does, without a launcher.

    world = ThreadWorld(4)
    sums = world.run(lambda collectives: collectives.allreduce(np.ones(3)))

Ranks are threads that exchange numpy arrays. What would hang a real job (ranks that make different
calls, a rank that stays away) raises here, and says which rank and which call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from zerohvd.communication.collectives import NumpyCollectives
from zerohvd.communication.log import CommLog
from zerohvd.errors import ZeroError

T = TypeVar("T")


class MismatchedCallsError(ZeroError):
    """Ranks met in different collective calls. Raised on every rank."""


class ReleasedError(ZeroError):
    """This rank was let go because another one failed; `ThreadWorld.run` raises that one's."""


class ThreadWorld:
    """`size` ranks as threads.

    Args:
        size: Number of ranks.
        timeout: Seconds a rank waits in a collective for the others.
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size
        self.timeout = timeout

    def run(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Call `fn(collectives, *args)` on every rank.

        Returns:
            What the ranks returned, in rank order.

        Raises:
            Exception: That of the lowest rank that failed by itself. Those of other ranks are
                attached as notes (Python 3.11 and later).
            TimeoutError: A rank did not come to a collective in which others waited.
            MismatchedCallsError: The ranks met in different collectives.
        """
        meeting = _Meeting(self.size, self.timeout)
        results: dict[int, T] = {}
        failures: dict[int, BaseException] = {}

        def live(rank: int) -> None:
            try:
                results[rank] = fn(ThreadCollectives(rank, meeting), *args)
            except BaseException as error:
                failures[rank] = error
                meeting.fail(rank, error)
            else:
                meeting.leave(rank)

        threads = [
            threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        running = self._join(threads, meeting)
        if failures:
            raise _root_cause(failures, running)
        return [results[rank] for rank in range(self.size)]

    def _join(self, threads: list[threading.Thread], meeting: _Meeting) -> list[int]:
        """Wait for the ranks; after a failure no longer than the timeout. Ranks still running."""
        try:
            for thread in threads:
                while thread.is_alive() and not meeting.failed.is_set():
                    thread.join(0.05)
            deadline = time.monotonic() + self.timeout
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        except BaseException as error:  # such as KeyboardInterrupt: leave no rank waiting
            meeting.fail(-1, error)
            raise
        return [rank for rank, thread in enumerate(threads) if thread.is_alive()]


class ThreadCollectives(NumpyCollectives):
    """One rank of a ThreadWorld."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, meeting.size
        self.log = CommLog(meeting.size)
        self._meeting = meeting

    def _exchange(self, parts: list[bytes], call: str) -> list[bytes]:
        return self._meeting.exchange(self.rank, parts, call)


class _Round:
    """One exchange: what each rank calls it and brings to it."""

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.parts: dict[int, list[bytes]] = {}
        self.complete = False


class _Meeting:
    """Where the ranks exchange bytes, round by round.

    Every rank keeps the round it came to, and the last to arrive opens the next one: nobody needs
    to wait for slow readers.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.failed = threading.Event()
        self._timeout = timeout
        self._changed = threading.Condition()
        self._round = _Round()
        self._left: set[int] = set()  # ranks that have returned: they never come again
        self._reason = ""

    def exchange(self, rank: int, parts: list[bytes], call: str) -> list[bytes]:
        with self._changed:
            self._check_alive()
            current = self._round
            current.calls[rank] = call
            current.parts[rank] = parts
            if len(current.calls) == self.size:
                current.complete = True
                self._round = _Round()
                self._changed.notify_all()
            self._wait(current)
        if len(set(current.calls.values())) > 1:
            raise MismatchedCallsError(_say_mismatch(current.calls))
        return [current.parts[r][rank] for r in range(self.size)]

    def _wait(self, current: _Round) -> None:
        deadline = time.monotonic() + self._timeout
        while not current.complete:
            self._check_alive()
            if self._left or time.monotonic() >= deadline:
                raise TimeoutError(self._say_missing(current))
            self._changed.wait(deadline - time.monotonic())

    def leave(self, rank: int) -> None:
        """`rank` has returned."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def fail(self, rank: int, error: BaseException) -> None:
        """`rank` has failed: nobody shall wait for it."""
        with self._changed:
            if not self.failed.is_set():
                who = f"rank {rank}" if rank >= 0 else "the caller"
                self._reason = f"{who} failed with {type(error).__name__}: {error}"
            self.failed.set()
            self._changed.notify_all()

    def _check_alive(self) -> None:
        if self.failed.is_set():
            raise ReleasedError(self._reason)

    def _say_missing(self, current: _Round) -> str:
        missing = sorted(set(range(self.size)) - set(current.calls))
        gone = sorted(self._left)
        how = f"ranks {gone} have returned" if gone else f"waited {self._timeout:g} s"
        return f"ranks {missing} did not come to {_say_calls(current.calls)} ({how})"


def _say_calls(calls: Mapping[int, str]) -> str:
    """Who is where, the lowest ranks first."""
    ranks_in: dict[str, list[int]] = {}
    for rank in sorted(calls):
        ranks_in.setdefault(calls[rank], []).append(rank)
    return "; ".join(f"{call}, in which ranks {ranks} wait" for call, ranks in ranks_in.items())


def _say_mismatch(calls: Mapping[int, str]) -> str:
    return f"the ranks met in different calls: {_say_calls(calls)}. All ranks must make the same."


def _root_cause(failures: Mapping[int, BaseException], running: list[int]) -> BaseException:
    """The failure of the lowest rank that failed by itself, with what happened to the others."""
    own = {r: e for r, e in failures.items() if not isinstance(e, ReleasedError)}
    lowest = min(own or failures)
    error = failures[lowest]
    notes = [f"raised by rank {lowest} of a ThreadWorld"]
    for rank in sorted(own.keys() - {lowest}):
        if str(own[rank]) != str(error):
            notes.append(f"rank {rank} raised {type(own[rank]).__name__}: {own[rank]}")
    if running:
        notes.append(f"ranks {running} are still running")
    if hasattr(error, "add_note"):
        for note in notes:
            error.add_note(note)
    return error
