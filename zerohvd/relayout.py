"""From one Layout to another: which range of which old shard goes where in which new one.

Parameters are matched by name, so the two layouts may differ in their number of ranks, in their
buckets, in flat or parameter partition, in the order and in the dtypes of their parameters. The
plan is pure integers: whoever holds the bytes (a file, an array, another rank) executes it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zerohvd.layout import Bucket, Layout, Slot, Span


class Copy(NamedTuple):
    """`length` elements of one parameter, from an old shard to a new one.

    Starts count elements from the beginning of the rank's shard of that bucket. A Copy never
    touches padding.
    """

    param: str
    src_rank: int
    src_bucket: int
    src_start: int
    dst_rank: int
    dst_bucket: int
    dst_start: int
    length: int


def copies(old: Layout, new: Layout, *, dst_rank: int | None = None) -> Iterator[Copy]:
    """What to copy so that every element of `old` arrives at its place in `new`, exactly once.

    Args:
        old: Where the elements are.
        new: Where they shall be; the same parameter names and shapes.
        dst_rank: Only what this rank of `new` receives. Costs what that rank holds, not what all
            ranks hold.

    Raises:
        ValueError: A parameter is missing on either side, or its shapes differ.
    """
    if dst_rank is not None and not 0 <= dst_rank < new.size:
        raise ValueError(f"dst_rank must be in [0, {new.size}), got {dst_rank}")
    return _copies(old, new, _match(old, new), dst_rank)


class _Part(NamedTuple):
    """A range of a parameter that one rank holds."""

    rank: int
    shard_start: int  # inside the rank's shard of the bucket
    param_span: Span  # inside the flattened parameter


def _match(old: Layout, new: Layout) -> tuple[int, ...]:
    """For every parameter of `new` its index in `old`."""
    index_of: Mapping[str, int] = {p.name: i for i, p in enumerate(old.params)}
    for spec in new.params:
        if spec.name not in index_of:
            raise ValueError(f"parameter {spec.name!r} is in the new layout, but not in the old")
        shape = old.params[index_of[spec.name]].shape
        if shape != spec.shape:
            raise ValueError(
                f"parameter {spec.name!r} has shape {shape} in the old layout, "
                f"but {spec.shape} in the new"
            )
    if len(old.params) != len(new.params):
        names = {p.name for p in new.params}
        extra = next(p.name for p in old.params if p.name not in names)
        raise ValueError(f"parameter {extra!r} is in the old layout, but not in the new")
    return tuple(index_of[p.name] for p in new.params)


def _copies(
    old: Layout, new: Layout, old_index: Sequence[int], dst_rank: int | None
) -> Iterator[Copy]:
    for bucket in new.buckets:
        for slot in _slots(bucket, dst_rank):
            within = slot.span if dst_rank is None else slot.span.intersect(bucket.span(dst_rank))
            name = new.params[slot.param].name
            for dst in _cut(bucket, slot, within):
                for src_bucket, src in _sources(old, old_index[slot.param], dst.param_span):
                    into = dst.shard_start + src.param_span.start - dst.param_span.start
                    yield Copy(
                        name,
                        src.rank,
                        src_bucket,
                        src.shard_start,
                        dst.rank,
                        bucket.index,
                        into,
                        src.param_span.length,
                    )


def _slots(bucket: Bucket, rank: int | None) -> Sequence[Slot]:
    """The slots of which `rank` holds something; of None: all."""
    if rank is None:
        return bucket.slots
    shard = bucket.span(rank)
    if not shard.length:
        return ()
    # Slots lie in ascending order and never overlap.
    first = bisect_right(bucket.slots, shard.start, key=lambda s: s.start) - 1
    stop = bisect_left(bucket.slots, shard.stop, first, key=lambda s: s.start)
    return [s for s in bucket.slots[first:stop] if s.span.stop > shard.start]


def _sources(old: Layout, param: int, wanted: Span) -> Iterator[tuple[int, _Part]]:
    """Who holds the range `wanted` of a parameter in `old`: (bucket index, part), in order."""
    slots = old.slots_of[param]
    first = bisect_right(slots, wanted.start, key=lambda bs: bs[1].param_start) - 1
    for index, slot in slots[first:]:
        if slot.param_start >= wanted.stop:
            return
        shift = slot.start - slot.param_start
        within = slot.span.intersect(wanted.shift(shift))
        for part in _cut(old.buckets[index], slot, within):
            yield index, part


def _cut(bucket: Bucket, slot: Slot, within: Span) -> Iterator[_Part]:
    """Cut the range `within` of a bucket, which lies inside `slot`, where shards meet."""
    back = slot.param_start - slot.start
    if bucket.whole:
        yield _Part(slot.owner, within.start - bucket.span(slot.owner).start, within.shift(back))
        return
    length = bucket.padded // bucket.size
    start = within.start
    while start < within.stop:
        rank = start // length
        stop = min(within.stop, (rank + 1) * length)
        yield _Part(rank, start - rank * length, Span(start, stop).shift(back))
        start = stop
