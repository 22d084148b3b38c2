"""An optimizer's state: sharded over the ranks by pieces, or whole by parameter.

What an optimizer keeps for a piece under a key is of one of four kinds:

- ELEMENT: a tensor with an element for each of the piece's, such as a momentum;
- TENSOR: a tensor of another shape, which only a whole parameter can have;
- SCALAR: a tensor without dimensions that all pieces of a parameter have alike, such as a counter;
- VALUE: no tensor, but something that JSON can say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from zerohvd.communication.collectives import Array
from zerohvd.errors import ShardedStateError
from zerohvd.layout import Bucket, Layout, ParamSpec, Piece

ELEMENT, TENSOR, SCALAR, VALUE = "element", "tensor", "scalar", "value"

# Per parameter and key: kind, content, dtype; see `PieceValue`.
_Known = dict[int, dict[str, list[Any]]]


class PieceValue(NamedTuple):
    """What the inner optimizer keeps for one piece of this rank under one key."""

    piece: Piece
    key: str
    kind: str
    dtype: str  # "" for a VALUE
    content: Any  # the number or value; the shape of a TENSOR; None for an ELEMENT
    tensor: Any = None  # the framework's, of an ELEMENT or TENSOR


class StateArrays(Protocol):
    """The tensor operations that collecting a state needs of a framework."""

    def zeros(self, length: int, dtype: str, bucket: int) -> Any:
        """Return 1-D memory near the bucket's, whose slices can be assigned to."""

    def flatten(self, x: Any) -> Any:
        """Return `x` as 1-D, to assign it to a slice; a view if `empty` made it."""

    def to_wire(self, x: Any) -> Any:
        """Return what `zeros` made or `flatten` returned as the collectives take it."""

    def to_host(self, x: Any) -> Any:
        """Return what the collectives gave in the host's memory; slices of it can be read."""

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """Return memory of the host for a whole tensor."""

    def scalar(self, value: Any, dtype: str) -> Any:
        """Return a tensor without dimensions."""


class Carries(Protocol):
    """Collectives, as far as collecting a state needs them; see `Collectives`."""

    rank: int
    size: int

    def allgather(self, x: Any, *, name: str) -> Any: ...

    def alltoall(self, x: Any, splits: Sequence[int], *, name: str) -> Any: ...

    def allgather_object(self, value: Any, *, name: str) -> list[Any]: ...


def collect_state(
    collectives: Carries,
    layout: Layout,
    held: Iterable[PieceValue],
    arrays: StateArrays,
    *,
    to: int | None,
    prefix: str,
) -> dict[int, dict[str, Any]]:
    """Return the whole state, per parameter index and key, on rank `to` (None: on every rank).

    All ranks must call it; the others get an empty dict. One bucket and key travels at a time, and
    only to rank `to`: no other rank needs memory for more than its own shard. Where the layout is
    that of a single rank nothing is communicated.

    Raises:
        TypeError: A value of some rank cannot be sent. Raised on all ranks, as is:
        ShardedStateError: A TENSOR belongs to a part of a parameter only.
    """
    mine = list(held)
    known = _agree(collectives, layout, mine, f"{prefix}/state/keys")
    return _Collector(collectives, layout, mine, known, arrays, to, f"{prefix}/state").run()


def check_destination(to: int | None, size: int) -> None:
    """Raise ValueError unless `to` is a rank, or None for all ranks."""
    if to is not None and not 0 <= to < size:
        raise ValueError(f"to must be a rank in [0, {size}) or None, got {to!r}")


def check_complete(wanted: Collection[str], stored: Collection[str], optimizer: str) -> None:
    """Raise ShardedStateError if a stored state lacks what the class `optimizer` keeps."""
    missing = sorted(set(wanted) - set(stored))
    if missing:
        raise ShardedStateError(
            f"the stored optimizer state lacks {missing[:3]} (of {len(missing)} missing): it was "
            f"saved by another kind of optimizer than {optimizer}"
        )


def part_of(value: Array, piece: Piece, spec: ParamSpec, shape: Sequence[int], key: str) -> Array:
    """The part of a whole state that belongs to a piece, whose own state has this shape."""
    part = value
    if piece.param_span.length != spec.numel:
        part = value.reshape(-1)[piece.param_span.start : piece.param_span.stop]
    if part.size != math.prod(shape):
        raise ShardedStateError(
            f"{key} was stored with shape {value.shape}, which does not fit {spec.name!r} of shape "
            f"{spec.shape}"
        )
    return part.reshape(tuple(shape))


def check_joinable(value: PieceValue, spec: ParamSpec) -> None:
    """Raise ShardedStateError for a TENSOR that belongs to a part of its parameter."""
    length = value.piece.param_span.length
    if value.kind == TENSOR and length != spec.numel:
        raise ShardedStateError(
            f"the state {value.key!r} of {spec.name!r} has shape {tuple(value.content)} for "
            f"{length} of the parameter's {spec.numel} elements: such parts cannot be put together "
            'again. Use partition="parameter" with this optimizer.'
        )


def _agree(
    collectives: Carries, layout: Layout, mine: Sequence[PieceValue], name: str
) -> _Known:
    """What exists on any rank, the same on all ranks."""
    everyone: list[Any] = [_describe(layout, mine)]
    if layout.size > 1:
        everyone = collectives.allgather_object(everyone[0], name=name)
    known: _Known = {}
    for described in everyone:
        if isinstance(described, list):
            refused, text = described
            raise (ShardedStateError if refused == TENSOR else TypeError)(text)
        for index, keys in described.items():
            known.setdefault(int(index), {}).update(keys)  # JSON has strings as keys
    return known


def _describe(layout: Layout, mine: Sequence[PieceValue]) -> dict[str, Any] | list[str]:
    """What this rank holds, or [kind, text] of the first value that cannot be collected."""
    found: dict[str, Any] = {}
    for value in mine:
        spec = layout.params[value.piece.param]
        if value.kind == VALUE and not _is_json(value.content):
            text = f"the state {value.key!r} of {spec.name!r} is a {type(value.content).__name__}"
            able = "tensors, numbers, strings, and lists of them can"
            return [VALUE, f"{text} that cannot be collected: {able}"]
        try:
            check_joinable(value, spec)
        except ShardedStateError as error:
            return [TENSOR, str(error)]
        keys = found.setdefault(str(value.piece.param), {})
        keys[value.key] = [value.kind, value.content, value.dtype]
    return found


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


class _Collector:
    """Collects one layout's state where it is wanted."""

    def __init__(
        self,
        collectives: Carries,
        layout: Layout,
        mine: Sequence[PieceValue],
        known: _Known,
        arrays: StateArrays,
        to: int | None,
        prefix: str,
    ) -> None:
        self._collectives, self._layout, self._known = collectives, layout, known
        self._arrays, self._to, self._prefix = arrays, to, prefix
        self._rank = collectives.rank if layout.size > 1 else 0
        self._here = to is None or to == collectives.rank
        self._whole: dict[int, dict[str, Any]] = {index: {} for index in sorted(known)}
        self._held: dict[tuple[int, str], list[PieceValue]] = {}
        for value in mine:
            if value.kind in (ELEMENT, TENSOR):
                self._held.setdefault((value.piece.bucket, value.key), []).append(value)

    def run(self) -> dict[int, dict[str, Any]]:
        for bucket in self._layout.buckets:
            self._elements(bucket)
        self._tensors()
        if not self._here:
            return {}
        for index, keys in self._known.items():
            for key, (kind, content, dtype) in keys.items():
                if kind == VALUE:
                    self._whole[index][key] = content
                elif kind == SCALAR:
                    self._whole[index][key] = self._arrays.scalar(content, dtype)
        return {
            index: {key: found[key] for key in self._known[index] if key in found}
            for index, found in self._whole.items()
        }

    def _elements(self, bucket: Bucket) -> None:
        """One flat shard per key and dtype."""
        wanted = {
            (key, dtype): None
            for slot in bucket.slots
            for key, (kind, _, dtype) in self._known.get(slot.param, {}).items()
            if kind == ELEMENT
        }
        span = bucket.span(self._rank)
        for key, dtype in wanted:
            shard = self._arrays.zeros(span.length, dtype, bucket.index)
            for value in self._held.get((bucket.index, key), ()):
                if (value.kind, value.dtype) == (ELEMENT, dtype):
                    place = value.piece.bucket_span.shift(-span.start)
                    shard[place.start : place.stop] = self._arrays.flatten(value.tensor)
            full = self._gather(shard, f"b{bucket.index}/{key}")
            if self._here:
                self._spread(bucket, key, dtype, self._arrays.to_host(full))

    def _spread(self, bucket: Bucket, key: str, dtype: str, full: Any) -> None:
        """Copy a bucket's slots into the tensors of their parameters."""
        for slot in bucket.slots:
            kind, _, stored = self._known.get(slot.param, {}).get(key, (None, None, None))
            if (kind, stored) != (ELEMENT, dtype):
                continue
            found = self._whole[slot.param]
            if key not in found:
                found[key] = self._arrays.empty(self._layout.params[slot.param].shape, dtype)
            stop = slot.param_start + slot.length
            target = self._arrays.flatten(found[key])
            target[slot.param_start : stop] = full[slot.start : slot.start + slot.length]

    def _tensors(self) -> None:
        """Tensors of other shapes, of whole parameters: one by one from their owner."""
        for index, keys in self._known.items():
            bucket = self._layout.slots_of[index][0][0]
            for key, (kind, shape, dtype) in keys.items():
                if kind != TENSOR:
                    continue
                held = [v for v in self._held.get((bucket, key), ()) if v.piece.param == index]
                if held:
                    part = self._arrays.flatten(held[0].tensor)
                else:
                    part = self._arrays.zeros(0, dtype, bucket)
                full = self._gather(part, f"p{index}/{key}")
                if self._here:
                    whole = self._whole[index][key] = self._arrays.empty(shape, dtype)
                    self._arrays.flatten(whole)[:] = self._arrays.to_host(full)

    def _gather(self, part: Any, name: str) -> Any:
        """The parts of all ranks in rank order, where they are wanted."""
        part = self._arrays.to_wire(part)
        if self._layout.size == 1:
            return part
        name = f"{self._prefix}/{name}"
        if self._to is None:
            return self._collectives.allgather(part, name=name)
        splits = [0] * self._collectives.size
        splits[self._to] = len(part)
        return self._collectives.alltoall(part, splits, name=name)
