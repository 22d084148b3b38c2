"""Many ranks in one process: what a parallel program does, without a launcher.

    world = ThreadWorld(4)
    sums = world.run(lambda collectives: collectives.allreduce(np.ones(3)))

Ranks are threads that exchange numpy arrays. Blocking collectives meet in the order of the calls;
those that are started now and waited for later meet by name, as in Horovod. What would hang a real
job (ranks that make different calls, a rank that stays away) raises here, and says which rank and
which call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from zerohvd.communication.collectives import Array, NumpyCollectives, check_op
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
        delay: Seconds that a collective found by name takes once all ranks have started it, given
            its name: a slow link.
    """

    def __init__(
        self, size: int, timeout: float = 60.0, delay: Callable[[str], float] | None = None
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size
        self.timeout = timeout
        self.delay = delay or (lambda name: 0.0)

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
        meeting = _Meeting(self.size, self.timeout, self.delay)
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

    def allreduce_start(self, x: Array, op: str = "sum", *, name: str) -> ThreadHandle:
        """Combine in place: `x` holds the result once the handle has been waited for."""
        check_op(op)
        self.log.add(name, "allreduce", x.dtype.name, x.size, x.nbytes)
        call = f"allreduce {name!r} ({op} of {x.dtype.name} {x.shape})"

        def combine(parts: list[Array]) -> Array:
            return self._reduce(parts, op, x.dtype)

        return self._start(name, call, x, x, combine)

    def gather_into(
        self, out: Array, own: Array, lengths: Sequence[int], *, name: str
    ) -> ThreadHandle:
        """Allgather `own`, this rank's part, into `out`; part r of it is `lengths[r]` long."""
        if len(own) != lengths[self.rank] or len(out) != sum(lengths):
            raise ValueError(f"{name!r}: {len(own)} of {len(out)} elements are not {lengths}")
        moved = own.nbytes * (self.size - 1)
        self.log.add(name, "allgather", out.dtype.name, out.size, out.nbytes, moved=moved)
        call = f"allgather {name!r} ({out.dtype.name}, lengths {list(lengths)})"
        return self._start(name, call, own, out, np.concatenate)

    def _start(
        self, name: str, call: str, x: Array, out: Array, combine: Callable[[list[Array]], Array]
    ) -> ThreadHandle:
        named = self._meeting.start(self.rank, name, call, x.copy(), combine)
        return ThreadHandle(self._meeting, named, out)


class ThreadHandle:
    """A collective of a ThreadWorld in flight."""

    def __init__(self, meeting: _Meeting, named: _Named, out: Array) -> None:
        self._meeting, self._named = meeting, named
        self._out: Array | None = out

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._meeting.is_over(self._named)

    def wait(self) -> None:
        """Wait until all ranks have started it; then the output holds the result."""
        if self._out is not None:
            result = self._meeting.result_of(self._named)
            out, self._out = self._out, None
            out[...] = result


class _Round:
    """One exchange: what each rank calls it and brings to it."""

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.parts: dict[int, list[bytes]] = {}
        self.complete = False


class _Named:
    """One collective that ranks find by name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: dict[int, str] = {}
        self.parts: dict[int, Array] = {}
        self.result: Array | None = None
        self.ready_at = float("inf")  # time.monotonic() from which on it is complete


class _Meeting:
    """Where the ranks exchange bytes, round by round, and arrays, by name.

    Every rank keeps the round it came to, and the last to arrive opens the next one: nobody needs
    to wait for slow readers.
    """

    def __init__(self, size: int, timeout: float, delay: Callable[[str], float]) -> None:
        self.size = size
        self.failed = threading.Event()
        self._timeout = timeout
        self._delay = delay
        self._changed = threading.Condition()
        self._round = _Round()
        self._named: dict[str, _Named] = {}  # those that not all ranks have started
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

    def start(
        self,
        rank: int,
        name: str,
        call: str,
        part: Array,
        combine: Callable[[list[Array]], Array],
    ) -> _Named:
        """Start a collective; the last rank to do so computes the result for all."""
        with self._changed:
            self._check_alive()
            named = self._named.setdefault(name, _Named(name))
            if rank in named.calls:
                raise ValueError(f"rank {rank} has {name!r} in flight already")
            named.calls[rank], named.parts[rank] = call, part
            if len(named.calls) == self.size:
                del self._named[name]
                if len(set(named.calls.values())) == 1:
                    named.result = combine([named.parts[r] for r in range(self.size)])
                named.parts.clear()
                named.ready_at = time.monotonic() + self._delay(name)
                self._changed.notify_all()
        return named

    def is_over(self, named: _Named) -> bool:
        """Whether it is complete, or never will be."""
        if time.monotonic() >= named.ready_at or self.failed.is_set():
            return True
        return bool(self._left - set(named.calls))

    def result_of(self, named: _Named) -> Array:
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while len(named.calls) < self.size:
                self._check_alive()
                if self._left - set(named.calls) or time.monotonic() >= deadline:
                    raise TimeoutError(self._say_missing(named))
                self._changed.wait(deadline - time.monotonic())
        time.sleep(max(0.0, named.ready_at - time.monotonic()))
        if named.result is None:
            raise MismatchedCallsError(_say_mismatch(named.calls))
        return named.result

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

    def _say_missing(self, current: _Round | _Named) -> str:
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
