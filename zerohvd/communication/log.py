"""What was moved: every collective of this rank, counted in bytes."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from zerohvd.config import MIB

# Enough for several steps of a large model; the totals never forget, the single records do.
KEPT_RECORDS = 100_000


class Record(NamedTuple):
    """One collective call on this rank."""

    name: str
    op: str  # allreduce, allgather, reducescatter, alltoall or broadcast
    dtype: str
    elements: int  # of the whole buffer: what is reduced, or what has been gathered
    nbytes: int  # of the whole buffer
    moved: int  # bytes this rank has to send by a bandwidth-optimal algorithm


class Total(NamedTuple):
    calls: int
    bytes: int  # moved


class CommunicationReport(Mapping[str, Total]):
    """Operation -> Total, those that were called, and "total" for all of them together."""

    def __init__(self, totals: Mapping[str, Total]) -> None:
        calls = sum(t.calls for t in totals.values())
        moved = sum(t.bytes for t in totals.values())
        self._totals = {**totals, "total": Total(calls, moved)}

    def __getitem__(self, op: str) -> Total:
        return self._totals[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._totals)

    def __len__(self) -> int:
        return len(self._totals)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._totals!r})"

    def __str__(self) -> str:
        rows = [(op, f"{t.calls:,}", f"{t.bytes / MIB:,.2f}") for op, t in self.items()]
        name, calls, moved = (max(len(row[i]) for row in rows) for i in range(3))
        return "\n".join(f"{n:<{name}}  {c:>{calls}} calls  {m:>{moved}} MiB" for n, c, m in rows)


class Wait(NamedTuple):
    """A wait that goes on."""

    what: str  # the name of a collective, or words
    start: float  # by `time.perf_counter`


class Watcher(Protocol):
    """Told of every collective and every wait of a rank, as they happen. Times are those of
    `time.perf_counter`."""

    def started(self, record: Record) -> None:
        """A collective has been started, or called."""

    def ended(self, name: str) -> None:
        """The collective of this name has been waited for."""

    def waited(self, what: str, start: float, stop: float) -> None:
        """This rank did nothing else between `start` and `stop`."""


class CommLog:
    """The collectives since the last `reset()`, and their totals per operation.

    Attributes:
        watchers: Told of everything; nobody unless a Monitor is on.
        waits: What this rank waits for now; None: it does not wait.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.watchers: list[Watcher] = []
        self.waits: Wait | None = None
        self._counts = True
        self.reset()

    def reset(self) -> None:
        self.records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._totals: dict[str, Total] = {}

    def add(
        self, name: str, op: str, dtype: str, elements: int, nbytes: int, moved: int | None = None
    ) -> None:
        """Note one call.

        Args:
            moved: Where it does not follow from the buffer's size, as in uneven exchanges.
        """
        if moved is None:
            moved = moved_bytes(op, nbytes, self._size)
        if not self._counts:
            return
        record = Record(name, op, dtype, elements, nbytes, moved)
        self.records.append(record)
        for watcher in self.watchers:
            watcher.started(record)
        calls, total = self._totals.get(op, (0, 0))
        self._totals[op] = Total(calls + 1, total + moved)

    def ended(self, name: str) -> None:
        """Tell watchers that a collective has been waited for."""
        for watcher in self.watchers:
            watcher.ended(name)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside, this rank waits for `what`; a wait inside of another is a part of it."""
        if self.waits is not None:
            yield
            return
        start = time.perf_counter()
        self.waits = Wait(what, start)
        try:
            yield
        finally:
            self.waits = None
            for watcher in self.watchers:
                watcher.waited(what, start, time.perf_counter())

    @contextlib.contextmanager
    def not_counting(self) -> Iterator[None]:
        """Inside, collectives are not noted: those that watchers themselves need."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def totals(self) -> dict[str, Total]:
        return dict(self._totals)

    def report(self) -> CommunicationReport:
        """The totals as they stand now, to look at or to print."""
        return CommunicationReport(self._totals)

    @property
    def moved(self) -> int:
        """Bytes this rank has sent, by all operations together."""
        return sum(t.bytes for t in self._totals.values())


def moved_bytes(op: str, nbytes: int, size: int) -> int:
    """Bytes one of `size` ranks has to send by a bandwidth-optimal algorithm."""
    share = nbytes - nbytes // size  # nbytes * (size - 1) / size, exact for padded buffers
    if op == "allreduce":
        return 2 * share
    if op == "broadcast":
        return nbytes if size > 1 else 0
    return share
