"""When a bucket may go out, and in which order: the same on every rank.

A rank may finish gradients in another order than its neighbour, or never (unused parameters).
Buckets still leave in the order of the layout, round after round: a rank that waited for bucket 5
while another waited for bucket 4 would hang with it as soon as buffers are limited.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from zerohvd.layout import Layout, Span


class Schedule:
    """Counts finished gradients, one round at a time.

    A round sends every bucket once. `ready(param)` says which buckets have become free to go;
    `flush()` names those that have not gone yet, for the caller to send as they are.
    """

    def __init__(self, layout: Layout) -> None:
        self._names = tuple(p.name for p in layout.params)
        self._members = tuple(
            frozenset(s.param for s in bucket.slots) for bucket in layout.buckets
        )
        self._buckets_of = tuple(
            tuple(dict.fromkeys(b for b, _ in slots)) for slots in layout.slots_of
        )
        self.start_round()

    def start_round(self, frozen: Collection[int] = ()) -> None:
        """Begin anew. `frozen` parameters are not waited for."""
        self._frozen = frozenset(frozen)
        self._seen: set[int] = set()
        self._missing = [len(members - self._frozen) for members in self._members]
        self._next = 0

    def has_seen(self, param: int) -> bool:
        return param in self._seen

    @property
    def finished(self) -> bool:
        """Whether every bucket of this round has been handed out."""
        return self._next == len(self._members)

    @property
    def started(self) -> bool:
        return bool(self._seen) or self._next > 0

    def ready(self, param: int) -> range:
        """Note that the gradient of `param` is complete; the buckets that go out now, in order."""
        if param in self._seen:
            raise ValueError(f"the gradient of {self._names[param]!r} was reported twice")
        self._seen.add(param)
        if param not in self._frozen:
            for bucket in self._buckets_of[param]:
                self._missing[bucket] -= 1
        first = self._next
        while not self.finished and self._missing[self._next] == 0:
            self._next += 1
        return range(first, self._next)

    def flush(self) -> range:
        """The buckets that have not gone out in this round, in order; the round is over then."""
        first, self._next = self._next, len(self._members)
        return range(first, self._next)


def cut_waves(layouts: Sequence[Layout], count: int) -> list[list[tuple[int, range]]]:
    """Cut all buckets, in the order in which they are sent, into `count` waves of about equal
    bytes: lists of (index of the layout, its buckets)."""
    goal = sum(bucket.nbytes for layout in layouts for bucket in layout.buckets) / count
    waves: list[list[tuple[int, range]]] = [[]]
    filled = 0
    for index, layout in enumerate(layouts):
        first = 0
        for b, bucket in enumerate(layout.buckets):
            filled += bucket.nbytes
            if filled >= goal and len(waves) < count:
                waves[-1].append((index, range(first, b + 1)))
                waves.append([])
                first, filled = b + 1, 0
        waves[-1].append((index, range(first, len(layout.buckets))))
    return waves


def exchange_rounds(lengths: Sequence[int], align: int) -> list[list[Span]]:
    """Cut an alltoall of a tensor, whose part r is `lengths[r]` long and goes to rank r, into
    rounds of which every rank receives about as much as it sends.

    In a single round, a rank that owns all of the tensor would hold one copy of it per rank.

    Returns:
        Per round the span that goes to each rank, which starts at a multiple of `align` in its
        part. No round is empty, unless all parts are.
    """
    count = max(1, -(-len(lengths) * max(lengths) // max(1, sum(lengths))))
    starts = list(itertools.accumulate(lengths, initial=0))
    rounds = []
    for i in range(count):
        spans = []
        for start, length in zip(starts, lengths, strict=False):
            step = -(-length // (align * count)) * align
            spans.append(Span(min(length, i * step), min(length, (i + 1) * step)).shift(start))
        if i == 0 or any(span.length for span in spans):
            rounds.append(spans)
    return rounds
