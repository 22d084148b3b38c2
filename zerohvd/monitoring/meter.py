"""The time of a step, split into compute, exposed communication and update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from zerohvd.communication.log import Record


class Split(NamedTuple):
    """Seconds of one step; the last three add up to the first."""

    seconds: float  # from the end of the step before to the end of this one
    compute: float  # forward and backward passes, data, and whatever else the script does
    communication: float  # waiting for collectives: what was not hidden behind compute
    update: float  # inside step(), without the waiting

    def __add__(self, other: Split) -> Split:  # type: ignore[override]
        return Split(*(a + b for a, b in zip(self, other, strict=True)))

    def scaled(self, factor: float) -> Split:
        return Split(*(a * factor for a in self))


NO_TIME = Split(0.0, 0.0, 0.0, 0.0)


class Meter:
    """Adds up the waits of this rank, and says at the end of a step where its time went.

    A watcher of a `CommLog`.
    """

    def __init__(self) -> None:
        self._last: float | None = None  # when the last step ended
        self._waited = 0.0
        self._update_from: float | None = None
        self._waited_before = 0.0  # of the waiting, that before the update

    def started(self, record: Record) -> None:
        """Nothing: what counts is how long this rank waits."""

    def ended(self, name: str) -> None:
        """Nothing."""

    def waited(self, what: str, start: float, stop: float) -> None:
        self._waited += stop - start

    def begin_update(self, *, anew: bool = False) -> None:
        """The update begins: what this rank does from now on is no compute.

        Args:
            anew: It begins only now, though it has been said to have begun before.
        """
        if self._update_from is None or anew:
            self._update_from, self._waited_before = time.perf_counter(), self._waited

    def end_step(self) -> Split | None:
        """Where the time has gone since the last call; None for the first one."""
        now = time.perf_counter()
        found = None
        if self._last is not None:
            seconds = now - self._last
            waited = min(self._waited, seconds)
            update = 0.0
            if self._update_from is not None:
                inside = self._waited - self._waited_before
                update = max(0.0, now - max(self._update_from, self._last) - inside)
            compute = max(0.0, seconds - waited - update)
            found = Split(seconds, compute, waited, seconds - waited - compute)
        self.restart(now)
        return found

    def restart(self, now: float | None = None) -> None:
        """Begin a step now: what lies between, such as an evaluation, is of none."""
        self._last = time.perf_counter() if now is None else now
        self._waited, self._update_from = 0.0, None


def split_of(
    start: float,
    stop: float,
    gradients: float,
    collectives: Sequence[tuple[float, float]],
    *,
    everywhere: bool = False,
) -> Split:
    """Where the time of a step went that has been measured from inside.

    Args:
        gradients: When all of them were computed: what comes after is communication or update.
        collectives: When each began and ended.
        everywhere: Those before `gradients` are exposed as well: the compute needs their results.
    """
    after = _covered(collectives, gradients, stop)
    before = _covered(collectives, start, gradients) if everywhere else 0.0
    seconds, update = stop - start, stop - gradients - after
    return Split(seconds, seconds - update - before - after, before + after, update)


def _covered(spans: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """How much of [start, stop] lies in any of the spans."""
    total, reached = 0.0, start
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, stop)
        if end > begin:
            total, reached = total + end - begin, end
    return total
