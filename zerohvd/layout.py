"""Where every parameter lives: pure integers, no tensors, no communication.

A `Layout` puts parameters into buckets (what travels together), in the order in which backward
passes complete them (last parameter first), and cuts each bucket into one contiguous shard per
rank. Every rank computes the same Layout from the same inputs.

    bucket 3:  | decoder.w ........ | decoder.b | norm.w | padding |
    shards:    | rank 0      | rank 1       | rank 2     | rank 3  |     partition="flat"

    bucket 3:  | decoder.w ........ | norm.w | decoder.b |
    shards:    | rank 0             | rank 2             |               partition="parameter"
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from zerohvd.config import MIB

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

# MPI counts are 32-bit: one collective moves fewer elements than this.
MAX_BUCKET_ELEMENTS = 2**31 - 1

# Parameters and shards of a flat bucket start at multiples of this many elements, so that vector
# units see the same elements in the same lanes as without sharding: fused optimizers round their
# vector and their left-over elements differently. Beyond the size below it would only be padding.
ALIGN = 16
ALIGN_UP_TO_SIZE = 64

# A parameter larger than a bucket is cut into bucket-sized chunks, but never into more than this
# many: the collectives of a trillion-parameter model must stay countable.
MAX_CHUNKS = 4


class Span(NamedTuple):
    """A half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def intersect(self, other: Span) -> Span:
        """The common part; an empty span where there is none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """A parameter as the layout sees it.

    Args:
        name: Unique name, as the user knows it.
        shape: Its shape; () is a scalar, a 0 anywhere makes it empty.
        dtype: A key of `DTYPE_BYTES`.
        group: Parameters of different groups never share a bucket.
        multiple: A flat bucket that begins with this parameter is cut at multiples of so many
            elements: the rows of a table stay whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    group: int | str = 0
    multiple: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"a parameter needs a non-empty name, got {self.name!r}")
        object.__setattr__(self, "shape", tuple(int(d) for d in self.shape))
        if any(d < 0 for d in self.shape):
            raise ValueError(f"parameter {self.name!r} has a negative dimension: {self.shape}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"parameter {self.name!r} has dtype {self.dtype!r}; "
                f"supported are {', '.join(DTYPE_BYTES)}"
            )

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


class Slot(NamedTuple):
    """A range of one parameter inside a bucket; the whole parameter unless it was chunked."""

    param: int  # index into Layout.params
    param_start: int  # first element of the parameter held here
    start: int  # first element in the bucket
    length: int
    owner: int  # rank that owns it whole; -1 where the bucket is cut flat

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + self.length)


def _owner(slot: Slot) -> int:
    return slot.owner


class Piece(NamedTuple):
    """What one rank owns of one parameter in one bucket."""

    param: int
    bucket: int
    param_span: Span  # inside the flattened parameter
    bucket_span: Span  # inside the bucket

    def parts(self, length: int) -> Iterator[Piece]:
        """The piece in parts of at most `length` elements."""
        for start in range(0, self.param_span.length, length):
            part = Span(start, min(start + length, self.param_span.length))
            yield self._replace(
                param_span=part.shift(self.param_span.start),
                bucket_span=part.shift(self.bucket_span.start),
            )

    def joined(self, last: Piece) -> Piece:
        """The piece from the start of this part to the end of `last`; see `parts`."""
        return self._replace(
            param_span=Span(self.param_span.start, last.param_span.stop),
            bucket_span=Span(self.bucket_span.start, last.bucket_span.stop),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one dtype that travel together."""

    index: int
    dtype: str
    slots: tuple[Slot, ...]
    numel: int  # without padding
    padded: int  # with padding, which lies behind any slot; a multiple of size where cut flat
    size: int  # ranks that share it
    whole: bool  # parameters are kept whole

    def span(self, rank: int) -> Span:
        """The shard of `rank`."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be in [0, {self.size}), got {rank}")
        if not self.whole:
            length = self.padded // self.size
            return Span(rank * length, (rank + 1) * length)
        # Slots are sorted by owner; a scan would make spans() quadratic at a thousand ranks.
        first = bisect_left(self.slots, rank, key=_owner)
        stop = bisect_right(self.slots, rank, first, key=_owner)
        return Span(self._start(first), self._start(stop))

    def _start(self, slot: int) -> int:
        return self.slots[slot].start if slot < len(self.slots) else self.numel

    def spans(self) -> tuple[Span, ...]:
        return tuple(self.span(r) for r in range(self.size))

    @property
    def lengths(self) -> list[int]:
        """The elements of every rank's shard."""
        return [self.span(r).length for r in range(self.size)]

    def gaps(self) -> Iterator[Span]:
        """The padding between and behind the slots."""
        stop = 0
        for slot in self.slots:
            if slot.start > stop:
                yield Span(stop, slot.start)
            stop = slot.start + slot.length
        if self.padded > stop:
            yield Span(stop, self.padded)

    @property
    def nbytes(self) -> int:
        return self.padded * DTYPE_BYTES[self.dtype]

    @property
    def padding(self) -> int:
        return self.padded - self.numel


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every parameter lives for one world size. Build it with `build_layout`."""

    params: tuple[ParamSpec, ...]
    size: int
    partition: str  # "flat" or "parameter"
    bucket_bytes: int
    buckets: tuple[Bucket, ...]
    chunk_bytes: int  # together with the four fields before buckets: all that build_layout needs

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return sum(b.padding for b in self.buckets)

    @cached_property
    def slots_of(self) -> tuple[tuple[tuple[int, Slot], ...], ...]:
        """Per parameter: its (bucket index, Slot) pairs, in the order of the parameter."""
        found: list[list[tuple[int, Slot]]] = [[] for _ in self.params]
        for bucket in self.buckets:
            for slot in bucket.slots:
                found[slot.param].append((bucket.index, slot))
        return tuple(tuple(sorted(f, key=lambda bs: bs[1].param_start)) for f in found)

    def chain_of(self, b: int) -> list[int]:
        """The buckets, `b` among them, that hold chunks of one parameter: they follow each other,
        in the order of the parameter. Only `b` where it holds whole parameters."""
        slots = self.buckets[b].slots
        return [i for i, _ in self.slots_of[slots[0].param]] if len(slots) == 1 else [b]

    def op_name(self, prefix: str, b: int, op: str) -> str:
        """The name of a collective on bucket `b`, after the bucket's first parameter."""
        return f"{prefix}/b{b}/{op}/{self.params[self.buckets[b].slots[0].param].name}"

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What `rank` owns, parameter by parameter inside each bucket; never padding."""
        for bucket in self.buckets:
            shard = bucket.span(rank)
            for slot in bucket.slots:
                held = slot.span.intersect(shard)
                if held.length:
                    param_span = held.shift(slot.param_start - slot.start)
                    yield Piece(slot.param, bucket.index, param_span, held)

    def shard_numel(self, rank: int) -> int:
        """Elements (padding included) that `rank` holds of all buckets."""
        return sum(b.span(rank).length for b in self.buckets)

    def fingerprint(self) -> str:
        """Differs whenever a name, shape, dtype, group, the order or any setting differs."""
        digest = hashlib.sha256()
        head = ["layout-1", self.size, self.partition, self.bucket_bytes, self.chunk_bytes]
        digest.update(json.dumps(head).encode())
        for p in self.params:
            multiple = [p.multiple] if p.multiple > 1 else []
            digest.update(json.dumps([p.name, p.shape, p.dtype, p.group, *multiple]).encode())
        return digest.hexdigest()


def build_layout(
    params: Iterable[ParamSpec],
    size: int,
    *,
    bucket_bytes: int = 8 * MIB,
    partition: str = "flat",
    chunk_bytes: int | None = None,
) -> Layout:
    """Lay out `params` for `size` ranks.

    Args:
        params: In model order; the last ones are expected to finish their gradients first.
        size: Number of ranks.
        bucket_bytes: Upper bound for a bucket before the padding at its end, unless it holds a
            single parameter that is kept whole, or a single chunk: a parameter is never cut into
            more than `MAX_CHUNKS`, nor finer than an aligned row of all ranks.
        partition: "flat" or "parameter".
        chunk_bytes: A parameter larger than this is cut into chunks; `bucket_bytes` unless given.
            For adapters that can send a large parameter whole without a copy.
    """
    specs = tuple(params)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be a positive number of ranks, got {size!r}")
    if partition not in ("flat", "parameter"):
        raise ValueError(f"partition must be 'flat' or 'parameter', got {partition!r}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    chunk_bytes = bucket_bytes if chunk_bytes is None else chunk_bytes
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    _check_unique([p.name for p in specs])
    owners = _balance(specs, size) if partition == "parameter" else None
    align = _alignment(size, partition)
    quantum = align * size
    filled = _fill_buckets(specs, bucket_bytes, chunk_bytes, align, quantum, owners)
    buckets = tuple(
        _close(i, specs[slots[0].param], slots, size, align, owners is not None)
        for i, slots in enumerate(filled)
    )
    return Layout(specs, size, partition, bucket_bytes, buckets, chunk_bytes)


def _check_unique(names: Sequence[str]) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(
                f"parameter name {name!r} occurs twice; names must be unique. "
                "A tied parameter is listed once, under its first name."
            )
        seen.add(name)


def _alignment(size: int, partition: str) -> int:
    return ALIGN if partition == "flat" and size <= ALIGN_UP_TO_SIZE else 1


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _chunks(index: int, spec: ParamSpec, chunk_bytes: int, quantum: int, owner: int) -> list[Slot]:
    """The whole parameter, or ranges of about `chunk_bytes` if it is larger than that."""
    numel = spec.numel
    count = -(-numel // (MAX_BUCKET_ELEMENTS - quantum))
    if owner < 0:
        count = max(count, min(MAX_CHUNKS, -(-spec.nbytes // chunk_bytes)))
    elif count > 1:
        raise ValueError(
            f"parameter {spec.name!r} has {numel} elements, more than one collective can move, "
            "so it cannot be kept whole: use partition='flat'"
        )
    if count <= 1:
        return [Slot(index, 0, 0, numel, owner)]
    # All but the last chunk are multiples of the quantum: only the end of a parameter is ever
    # padded, so that its chunks can lie side by side in memory.
    length = round_up(-(-numel // count), quantum)
    return [
        Slot(index, start, 0, min(length, numel - start), owner)
        for start in range(0, numel, length)
    ]


def _fill_buckets(
    specs: Sequence[ParamSpec],
    bucket_bytes: int,
    chunk_bytes: int,
    align: int,
    quantum: int,
    owners: Sequence[int] | None,
) -> list[list[Slot]]:
    """Slots (their place in the bucket not yet set), a list per bucket, in the order in which
    backward completes them: with the last of its parameters, the one of the lowest index."""
    closed: list[tuple[int, int, list[Slot]]] = []
    open_: dict[tuple[str, int | str], tuple[list[Slot], int]] = {}
    for index in reversed(range(len(specs))):
        spec = specs[index]
        if spec.numel == 0:
            continue
        owner = -1 if owners is None else owners[index]
        chunks = _chunks(index, spec, chunk_bytes, quantum, owner)
        # A large parameter travels alone: its gradient then needs no copy into a bucket.
        if len(chunks) > 1 or 2 * spec.nbytes >= bucket_bytes:
            closed.extend((-index, c.param_start, [c]) for c in chunks)
            continue
        key = (spec.dtype, spec.group)
        held, held_bytes = open_.get(key, ([], 0))
        most = min(bucket_bytes, (MAX_BUCKET_ELEMENTS - quantum) * DTYPE_BYTES[spec.dtype])
        if held and held_bytes + spec.nbytes > most:
            closed.append((-held[-1].param, 0, held))
            held, held_bytes = [], 0
        held.append(chunks[0])
        aligned = round_up(spec.numel, align) * DTYPE_BYTES[spec.dtype]
        open_[key] = (held, held_bytes + aligned)
    closed.extend((-held[-1].param, 0, held) for held, _ in open_.values())
    return [slots for _, _, slots in sorted(closed)]


def _close(
    index: int, first: ParamSpec, slots: list[Slot], size: int, align: int, whole: bool
) -> Bucket:
    if whole:
        slots.sort(key=lambda s: s.owner)
    numel = stop = slots[0].length
    for i in range(1, len(slots)):
        start = round_up(stop, align)
        slots[i] = slots[i]._replace(start=start)
        numel += slots[i].length
        stop = start + slots[i].length
    padded = stop if whole else round_up(stop, math.lcm(align, first.multiple) * size)
    return Bucket(index, first.dtype, tuple(slots), numel, padded, size, whole)


def _balance(specs: Sequence[ParamSpec], size: int) -> list[int]:
    """An owner for every parameter: the largest first, each to the rank that holds least."""
    owners = [0] * len(specs)
    load = [(0, rank) for rank in range(size)]
    for index in sorted(range(len(specs)), key=lambda i: (-specs[i].numel, i)):
        held, rank = heapq.heappop(load)
        owners[index] = rank
        heapq.heappush(load, (held + specs[index].numel, rank))
    return owners
