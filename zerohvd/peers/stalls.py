"""Who is missing: ranks that wait for long ask each other what they have started.

A collective goes on only when every rank has started it, and Horovod tells the first rank alone
which have not. So every rank remembers what it has in flight, and a thread of it answers. The first
rank asks all others, once for all ranks that want to know the same: with many ranks, each asking
each would be a storm of connections in a job that is in trouble already.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from zerohvd import limits
from zerohvd.communication.log import CommLog, Wait
from zerohvd.errors import ZeroError

_FRESH = 5.0  # seconds for which an answer holds for other ranks
_AT_ONCE = 32  # connections
_NAMED = 8  # ranks in one message
_PARAMETER = "/b"  # in the names of collectives on buckets, which end with a parameter's name


class Answer(NamedTuple):
    """What a rank says when it is asked about a collective."""

    started: bool  # this very collective is in flight
    waits_for: str  # what it waits for, in the user's words; "": it does not wait
    seconds: float  # for how long
    steps: int  # that it has made


class Whereabouts:
    """What this rank has in flight and what it waits for.

    Attributes:
        ask: Asks all ranks about a collective; None where they cannot ask each other.
    """

    def __init__(self, log: CommLog) -> None:
        self.ask: Callable[[str], Sequence[Answer | None]] | None = None
        self._log = log
        self._in_flight: dict[str, Callable[[], bool]] = {}

    def started(self, name: str, done: Callable[[], bool]) -> None:
        """A collective is in flight until `done()`."""
        self._in_flight[name] = done

    def ended(self, name: str) -> None:
        self._in_flight.pop(name, None)

    def answer(self, name: str, steps: int) -> Answer:
        """What this rank says about a collective; called in another thread."""
        now = time.perf_counter()
        waits = self._log.waits or Wait("", now)
        return Answer(self._has(name), limits.in_words(waits.what), now - waits.start, steps)

    def _has(self, name: str) -> bool:
        done = self._in_flight.get(name)
        # One that is done is of an earlier step: nobody has waited for it yet.
        with contextlib.suppress(Exception):  # or has waited for it this moment
            return done is not None and not done()
        return False

    def also_waiting(self, name: str) -> str:
        """A sentence about what else is in flight: a rank mostly waits at the beginning of a call,
        and the parameters are those of what follows."""
        others = [n for n in list(self._in_flight) if n != name and _PARAMETER in n]
        first = next((n for n in others if self._has(n)), None)
        return "" if first is None else f" In flight as well: {limits.in_words(first)}."

    def who_is_missing(self, name: str, members: Sequence[int], hosts: Sequence[str]) -> str:
        """A sentence about the ranks that have not started the collective; "": nobody knows."""
        if self.ask is None:
            return ""
        try:
            answers = self.ask(name)
        except Exception as error:  # a question must not break a wait that is only long
            return f"Who is missing is not known: {error}."
        missing = [(r, a) for r, a in enumerate(answers) if a is None or not a.started]
        said = [_describe(members[r], hosts[r] if hosts else "", a) for r, a in missing[:_NAMED]]
        if len(missing) > _NAMED:
            said.append(f"and {len(missing) - _NAMED} other ranks")
        if not said:
            return "All ranks have started it: the network is slow or broken."
        return f"Missing: {'; '.join(said)}."


def _describe(rank: int, host: str, answer: Answer | None) -> str:
    who = f"rank {rank} ({host})" if host else f"rank {rank}"
    if answer is None:
        return f"{who} does not answer: it has ended, has left the call, or is stopped"
    if answer.waits_for:
        return f"{who} has waited {answer.seconds:.0f} s for something else: {answer.waits_for}"
    return (
        f"{who} waits for nothing, after {answer.steps} steps: it computes, reads data, or is in a "
        "call of your own"
    )


class Inquiry:
    """Asks all ranks about a collective, once for all who want to know."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, list[Answer | None]]] = {}

    def about(self, name: str, ask: Callable[[int, str], Any]) -> list[Answer | None]:
        """What each rank says, in rank order; None: it does not answer.

        Args:
            ask: Asks one rank; raises ZeroError if it does not answer.
        """

        def one(rank: int) -> Answer | None:
            try:
                return Answer(*ask(rank, name))
            except ZeroError:
                return None

        with self._lock:
            at, answers = self._known.get(name, (0.0, []))
            if not answers or time.monotonic() - at > _FRESH:
                with ThreadPoolExecutor(min(self._size, _AT_ONCE)) as threads:
                    answers = list(threads.map(one, range(self._size)))
                self._known = {name: (time.monotonic(), answers)}
            return answers


def warn(
    whereabouts: Whereabouts,
    name: str,
    rank: int,
    members: Sequence[int],
    hosts: Sequence[str],
    waited: float,
) -> None:
    """Say on this rank's stderr what it waits for, and who is missing."""
    missing = whereabouts.who_is_missing(name, members, hosts) + whereabouts.also_waiting(name)
    limits.say_stalled(members[rank], members, limits.in_words(name), waited, missing)
