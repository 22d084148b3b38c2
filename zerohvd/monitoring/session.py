"""A monitored run: steps are measured on every rank, and every k steps one record is made of all.

The ranks' numbers meet in one small allgather, which is started at the end of a step and waited for
at the end of the next one: by then every rank has come to it, so nobody waits. Which steps it
happens after follows from the number of steps alone, which is the same on all ranks.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from zerohvd.communication.log import CommunicationReport
from zerohvd.memory import MemoryReport
from zerohvd.monitoring.meter import NO_TIME, Split
from zerohvd.monitoring.sinks import Sink
from zerohvd.monitoring.stragglers import behind, find_straggler

EVERY = 10


class Numbers(NamedTuple):
    """What one rank tells the others: of its steps since the last time, in the mean."""

    seconds: float
    compute: float
    communication: float
    update: float
    samples: float  # per step; NaN: not known
    loss: float  # NaN: not known
    square: float  # sum of the squares of this rank's gradients; NaN: not known
    memory: float  # bytes that are held
    peak: float  # bytes of the process at most, so far
    # Seconds of waiting in the median step: one that was interrupted makes no straggler of a rank.
    wait: float


class Pending(Protocol):
    """The numbers of all ranks, on their way."""

    def result(self) -> Sequence[Sequence[float]]:
        """Rows of numbers, in rank order; waits for them."""


class State(NamedTuple):
    """What an adapter knows of the step that has just ended; asked for before a record only."""

    memory: MemoryReport
    moved: CommunicationReport
    square: float | None = None  # sum of the squares of this rank's gradients
    grad_norm: float | None = None  # of all ranks, where it is known already
    replicated: bool = False  # every rank has all gradients
    loss_scale: float | None = None
    peak: int = 0  # bytes on an accelerator; 0: there is none


class Session:
    """The numbers of this rank's steps, and on the first rank the records.

    Attributes:
        steps: So far, skipped ones and those before the session too.
        skipped: Steps that were not applied, as gradients had overflowed.
        last: The latest record; on every rank.
    """

    def __init__(
        self,
        exchange: Callable[[Sequence[float]], Pending],
        *,
        rank: int,
        hosts: Sequence[str] = (),
        members: Sequence[int] | None = None,
        every: int = EVERY,
        samples: float | None = None,
        sinks: Sequence[Sink] = (),
        start: int = 0,
    ) -> None:
        """
        Args:
            exchange: Starts the allgather of this rank's numbers.
            hosts: Of all ranks.
            members: What the ranks are called; their numbers unless given.
            every: Steps per record; the same on all ranks.
            samples: Of this rank per step, unless a step says otherwise.
            sinks: Where records go; used on the first rank.
            start: Steps that were made before, as in a run that is resumed.
        """
        self.every = check_every(every)
        self.steps, self.skipped = _check_start(start), 0
        self._start = start
        self.last: dict[str, Any] | None = None
        self._exchange, self._rank, self._hosts, self._members = exchange, rank, hosts, members
        self._samples, self._sinks = samples, sinks
        self._pending: tuple[Pending, dict[str, Any], State] | None = None
        self._values: dict[str, list[Any]] = {}
        self._forget()

    def _forget(self) -> None:
        self._split, self._waits = NO_TIME, list[float]()
        self._count, self._counted, self._skipped_here = 0.0, 0, 0
        self._values = {}

    def log(self, **values: Any) -> None:
        """Add numbers to the next record: their mean over the steps since the last one."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def end_step(
        self,
        split: Split | None,
        state: Callable[[], State],
        *,
        samples: float | None = None,
        skipped: int = 0,
    ) -> None:
        """Note a step; all ranks must call it equally often.

        Args:
            split: Where its time went; None: not known, as of the first one.
            state: Asked for if a record is due.
            samples: Of this rank in this step, if that is known.
            skipped: Steps that were not applied, up to this one, and have not been noted.
        """
        self.finish()
        self.steps += 1
        if split is not None:
            self._split = self._split + split
            self._waits.append(split.communication)
        found = self._samples if samples is None else samples
        if found is not None:
            self._count, self._counted = self._count + found, self._counted + 1
        self.skipped += skipped
        self._skipped_here += skipped
        # Not by `steps`: ranks that were told another start would not meet.
        if (self.steps - self._start) % self.every == 0:
            self._send(state())

    @property
    def is_due(self) -> bool:
        """Whether a record will be made of the next step."""
        return (self.steps + 1 - self._start) % self.every == 0

    def _send(self, state: State) -> None:
        split = self._split.scaled(1.0 / max(1, len(self._waits)))
        wait = statistics.median(self._waits) if self._waits else 0.0
        own = {name: _mean(values) for name, values in self._values.items()}
        samples = self._count / self._counted if self._counted else math.nan
        square = math.nan if state.square is None else state.square
        peak = state.peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        loss = own.pop("loss", math.nan)
        told = Numbers(*split, samples, loss, square, state.memory["total"], peak, wait)
        record = {
            "step": self.steps,
            "wall_time": time.time(),
            **own,
            "skipped": self._skipped_here,
            "skipped_total": self.skipped,
        }
        self._forget()
        self._pending = (self._exchange(told), record, state)

    def finish(self) -> None:
        """Make a record of what the ranks have told, if they have."""
        if self._pending is None:
            return
        (pending, record, state), self._pending = self._pending, None
        ranks = [Numbers(*row) for row in pending.result()]
        self.last = self._record(record, ranks, state)
        if self._rank == 0:
            self._sinks = [sink for sink in self._sinks if _takes(sink, dict(self.last))]

    def _record(
        self, record: dict[str, Any], ranks: Sequence[Numbers], state: State
    ) -> dict[str, Any]:
        mine = ranks[self._rank]
        found: dict[str, Any] = {
            **record,
            "time/step": mine.seconds,
            "time/compute": mine.compute,
            "time/communication": mine.communication,
            "time/update": mine.update,
            **_together(ranks, state, mine.seconds),
            **{f"bytes/{op}": total.bytes for op, total in state.moved.items()},
            **{f"memory/{kind}": state.memory[kind] for kind in state.memory},
            "memory/peak": int(max(r.peak for r in ranks)),
        }
        waits = [r.wait for r in ranks]
        members = range(len(ranks)) if self._members is None else self._members
        slow = find_straggler(waits, mine.seconds, self._hosts, members)
        found["slowest"] = "" if slow is None else str(slow)
        found["slowest_rank"] = -1 if slow is None else slow.rank
        found["slowest_behind"] = 0.0 if slow is None else slow.behind
        found["ranks/compute"] = [r.compute for r in ranks]
        found["ranks/communication"] = [r.communication for r in ranks]
        found["ranks/update"] = [r.update for r in ranks]
        found["ranks/behind"] = behind(waits)
        found["ranks/memory"] = [int(r.memory) for r in ranks]
        found["hosts"] = list(self._hosts)
        return found


def _together(
    ranks: Sequence[Numbers], state: State, seconds: float
) -> Mapping[str, float]:
    """What is known of all ranks together."""
    found = {}
    losses = [r.loss for r in ranks if not math.isnan(r.loss)]
    if losses:
        found["loss"] = math.fsum(losses) / len(losses)
    samples = math.fsum(r.samples for r in ranks)
    if not math.isnan(samples) and seconds > 0.0:
        found["samples_per_second"] = samples / seconds
    if state.grad_norm is not None:
        found["grad_norm"] = state.grad_norm
    elif state.square is not None:
        squares = [state.square] if state.replicated else [r.square for r in ranks]
        found["grad_norm"] = math.sqrt(sum(squares))
    if state.loss_scale is not None:
        found["loss_scale"] = state.loss_scale
    return found


def _takes(sink: Sink, record: dict[str, Any]) -> bool:
    """Whether a sink has taken a record. One that fails must not end the training."""
    try:
        sink.log(record)
    except Exception as error:
        name = type(sink).__name__
        warnings.warn(f"zero.Monitor writes no more to {name}: {error!r}", stacklevel=2)
        return False
    return True


def _mean(values: Sequence[Any]) -> float:
    numbers = [float(v) for v in values]
    return sum(numbers) / len(numbers)


def _check_start(start: int) -> int:
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise ValueError(f"start must be a number of steps of at least 0, got {start!r}")
    return start


def check_every(every: int) -> int:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a number of steps of at least 1, got {every!r}")
    return every
