"""What a rank holds, in bytes: estimated from a Layout before training, reported during it."""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from zerohvd import numerics
from zerohvd.config import MIB, STAGES
from zerohvd.layout import DTYPE_BYTES, Layout

KEYS = ("params", "grads", "optimizer", "master", "buffers", "total")

# What each stage cuts into shards; None is plain Horovod.
_SHARDED: Mapping[int | None, tuple[str, ...]] = {
    None: (),
    0: (),
    1: ("optimizer", "master"),
    2: ("optimizer", "master", "grads"),
    3: ("optimizer", "master", "grads", "params"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MemoryReport(Mapping[str, int]):
    """Bytes one rank holds, by purpose; a mapping with exactly the keys `KEYS`."""

    params: int = 0
    """Parameters; at stage 3 this rank's shards."""

    grads: int = 0
    """Gradients that outlive the backward pass."""

    optimizer: int = 0
    """The inner optimizer's state, such as Adam's moments."""

    master: int = 0
    """The wider copy of the parameters that the optimizer updates, where there is one."""

    buffers: int = 0
    """What is in flight: buckets on their way, and at stage 3 gathered units."""

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer + self.master + self.buffers

    def __getitem__(self, key: str) -> int:
        if key not in KEYS:
            raise KeyError(key)
        value: int = getattr(self, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)

    def __str__(self) -> str:
        values = {key: f"{self[key] / MIB:,.2f}" for key in KEYS}
        width = max(len(v) for v in values.values())
        return "\n".join(f"{key:<9}  {values[key]:>{width}} MiB" for key in KEYS)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MemoryEstimate(MemoryReport):
    """What one rank will hold, and for which stage that was asked."""

    stage: int | None
    """None: plain Horovod."""

    size: int
    """Number of ranks."""

    def __str__(self) -> str:
        what = "plain Horovod" if self.stage is None else f"stage {self.stage}"
        return f"{what}, {self.size} ranks, per rank:\n{super().__str__()}"


def estimate(
    layout: Layout,
    *,
    stage: int | None,
    state_per_param: int = 2,
    master_dtype: str | None = None,
    grad_dtype: str | None = None,
    in_flight: int = 2,
    rank: int | None = None,
) -> MemoryEstimate:
    """What one rank holds of parameters, gradients and optimizer state; activations not counted.

    Args:
        layout: Of the model, for the number of ranks in question.
        stage: 0 to 3; None for plain Horovod, which neither shards nor pads anything.
        state_per_param: Numbers of optimizer state per parameter element, in the master dtype:
            2 for Adam, 1 for SGD with momentum, 0 for SGD.
        master_dtype: What the optimizer updates; None: float32 for narrower floats, else the
            parameters themselves.
        grad_dtype: Of the gradients; None: that of their parameters.
        in_flight: Buckets, and at stage 3 units (the groups of the layout), held at a time.
        rank: This rank's share; None: that of the rank that holds most.
    """
    if stage is not None and stage not in STAGES:
        raise ValueError(f"stage must be None or one of {STAGES}, got {stage!r}")
    if state_per_param < 0:
        raise ValueError(f"state_per_param must not be negative, got {state_per_param}")
    costs = {
        bucket.dtype: _cost(bucket.dtype, master_dtype, grad_dtype, state_per_param)
        for bucket in layout.buckets
    }
    if rank is None:
        rank = _fullest_rank(layout, costs, _SHARDED[stage])
    held = dict.fromkeys(_Cost._fields, 0)
    for bucket in layout.buckets:
        full = bucket.numel if stage is None else bucket.padded
        shard = bucket.span(rank).length
        for what, each in costs[bucket.dtype]._asdict().items():
            held[what] += each * (shard if what in _SHARDED[stage] else full)
    return MemoryEstimate(
        **held,
        buffers=_in_flight_bytes(layout, stage, costs, in_flight),
        stage=stage,
        size=layout.size,
    )


def format_bytes(count: float) -> str:
    """A number of bytes as people read it, in units of 1024: "1.50 GiB"."""
    if abs(count) < 1024:
        return f"{count:g} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 1024 or unit == "TiB":
            break
    return f"{count:,.2f} {unit}"


class _Cost(NamedTuple):
    """Bytes per element."""

    params: int
    grads: int
    optimizer: int
    master: int


def _cost(
    dtype: str, master_dtype: str | None, grad_dtype: str | None, state_per_param: int
) -> _Cost:
    updated = numerics.master_dtype(dtype, master_dtype)
    return _Cost(
        params=DTYPE_BYTES[dtype],
        grads=DTYPE_BYTES[grad_dtype or dtype],
        optimizer=DTYPE_BYTES[updated] * state_per_param,
        master=DTYPE_BYTES[updated] if updated != dtype else 0,
    )


def _fullest_rank(layout: Layout, costs: Mapping[str, _Cost], sharded: Collection[str]) -> int:
    """Flat shards are all of one length; whole parameters are not."""
    held: defaultdict[int, int] = defaultdict(int, {0: 0})
    if layout.partition == "parameter":
        each = {d: sum(getattr(cost, what) for what in sharded) for d, cost in costs.items()}
        for bucket in layout.buckets:
            for slot in bucket.slots:
                held[slot.owner] += slot.length * each[bucket.dtype]
    return max(held, key=lambda r: (held[r], -r))


def _in_flight_bytes(
    layout: Layout, stage: int | None, costs: Mapping[str, _Cost], in_flight: int
) -> int:
    """The largest buckets (stage 3: and units) that can be on their way at the same time."""
    if not stage:
        return 0
    moving = _largest([b.padded * costs[b.dtype].grads for b in layout.buckets], in_flight)
    if stage < 3:
        return moving
    units: defaultdict[int | str, int] = defaultdict(int)
    for bucket in layout.buckets:
        units[layout.params[bucket.slots[0].param].group] += bucket.nbytes
    return moving + _largest(units.values(), in_flight)


def _largest(sizes: Iterable[int], count: int) -> int:
    return sum(heapq.nlargest(count, sizes))
