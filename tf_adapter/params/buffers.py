"""Pack tensors into buckets and unpack them, where the layout says.

Slots and shards start at multiples of 64 bytes, where TensorFlow slices without a copy. A large
parameter has a bucket of its own and enters and leaves it by a reshape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras.communication import arrays
from zerohvd.layout import Bucket, Layout, Span


def pack(bucket: Bucket, flats: Mapping[int, Any], dtype: Any) -> Any:
    """A 1-D tensor of the bucket's padded length, from the parameters' values by index, 1-D.

    A parameter that is missing in `flats` becomes zeros.
    """
    parts, spans = [], []
    for slot in bucket.slots:
        flat = flats.get(slot.param)
        if flat is None:
            continue
        if slot.length != flat.shape[0]:
            flat = flat[slot.param_start : slot.param_start + slot.length]
        parts.append(tf.cast(flat, dtype))
        spans.append(slot.span)
    return _fill(parts, spans, bucket.padded, dtype)


def pack_shard(bucket: Bucket, rank: int, values: Sequence[Any], spans: Sequence[Span]) -> Any:
    """The shard of `rank`, from the values of its pieces and their spans in the bucket."""
    shard = bucket.span(rank)
    parts = [arrays.flatten(tf.cast(v, bucket.dtype)) for v in values]
    return _fill(parts, [s.shift(-shard.start) for s in spans], shard.length, bucket.dtype)


def cut(x: Any, span: Span) -> Any:
    """A slice of a 1-D tensor; no operation if that is all of it."""
    return arrays.cut(x, span.start, span.stop)


def _fill(parts: Sequence[Any], spans: Sequence[Span], length: int, dtype: Any) -> Any:
    """The parts at their spans, zeros between and behind them."""
    pieces, at = [], 0
    for part, span in zip(parts, spans, strict=True):
        if span.start > at:
            pieces.append(tf.zeros([span.start - at], dtype))
        pieces.append(part)
        at = span.stop
    if length > at:
        pieces.append(tf.zeros([length - at], dtype))
    if not pieces:
        return tf.zeros([0], dtype)
    return pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)


class Assembly:
    """Assigns gathered buckets to variables, as soon as all chunks of a variable are there."""

    def __init__(self, layout: Layout, natives: Sequence[Any]) -> None:
        self._layout, self._natives = layout, natives
        self._chunks: dict[int, list[Any]] = {}

    def add(self, bucket: Bucket, full: Any) -> list[Any]:
        """Unpack a bucket; returns operations to wait for."""
        done = []
        for slot in bucket.slots:
            part = cut(full, slot.span)
            chunks = self._chunks.setdefault(slot.param, [])
            chunks.append((slot.param_start, part))
            if len(chunks) == len(self._layout.slots_of[slot.param]):
                parts = [p for _, p in sorted(self._chunks.pop(slot.param), key=lambda c: c[0])]
                flat = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
                native = self._natives[slot.param]
                value = arrays.reshape(flat, native.shape)
                done.append(native.assign(value, read_value=False))
        return done or [full]
