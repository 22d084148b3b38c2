"""Large embedding tables, sharded by rows: a batch fetches the rows it needs and no others.

A rank asks the owners for its rows, by an alltoall of indices, and gets them by an alltoall of
rows. In backward the rows of gradients travel to their owners. A shard may begin inside of a row:
the row belongs to the rank that has its first element, which gets the rest from the next rank, and
gives it that part of the gradient.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.communication import arrays
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.communication.wire import Wire
from zerohvd.keras.stage3.running import Collecting
from zerohvd.keras.stage3.storage import UnitBucket
from zerohvd.layout import Span

# Smaller tables are gathered: that is one collective instead of three.
ROWS_FROM_BYTES = 1 << 20


def is_large_table(layer: Any) -> bool:
    """Whether a layer looks up rows of a large table, and does nothing else."""
    if type(layer) is not keras.layers.Embedding or not layer.built:
        return False
    own = compat.own_weights(layer)
    large = len(own) == 1 and arrays.nbytes(own[0]) >= ROWS_FROM_BYTES
    return large and layer.quantization_mode is None and not layer.lora_enabled


class _Fetched(NamedTuple):
    """What backward needs of the forward pass: whole numbers alone."""

    place: Any  # per index of the batch: its row among those that were fetched
    wanted: Any  # rows that this rank asked for, ascending
    splits: Any  # how many of them each rank has
    asked: Any  # rows that other ranks asked this one for


class RowTable:
    """The table of one Embedding layer."""

    def __init__(self, bucket: UnitBucket, wire: Wire) -> None:
        self.bucket, self._wire = bucket, wire
        self.variable = bucket.variables[0]
        self._width = math.prod(self.variable.shape[1:])
        spans = bucket.spans_of(0)
        width = self._width
        self._first = [-(-s.start // width) for s in spans]
        self._stop = [max(f, -(-s.stop // width)) for f, s in zip(self._first, spans, strict=True)]
        # A rank without elements has no rows; its first must not lie behind its stop.
        self._heads = [
            f * width - s.start if s.length else 0 for f, s in zip(self._first, spans, strict=True)
        ]
        self._tails = [self._tail(rank, spans) for rank in range(len(spans))]

    def _tail(self, rank: int, spans: list[Span]) -> int:
        """How many elements of this rank's last row the next rank has."""
        span = spans[rank]
        return self._stop[rank] * self._width - span.stop if span.length else 0

    @classmethod
    def of(cls, bucket: UnitBucket, wire: Wire) -> RowTable | None:
        """The table, if no row lies on more than two ranks."""
        width = math.prod(bucket.variables[0].shape[1:])
        spans = [s for s in bucket.spans_of(0) if s.length]
        if len(bucket.variables) != 1 or any(s.length < 2 * width for s in spans[:-1]):
            return None
        return cls(bucket, wire)

    # -- forward and backward ---------------------------------------------------------------------

    def look_up(self, indices: Any, how: Collecting, name: str, weigh: Any) -> Any:
        """The rows of the table at `indices`."""
        rows, size = self.variable.shape[0], tuple(self.variable.shape[1:])
        indices = tf.where(indices < 0, indices + rows, indices)  # as Keras counts from the end
        said = f"an index is not in the table {self.variable.path!r} of {rows} rows"
        inside = tf.debugging.Assert(tf.reduce_all((indices >= 0) & (indices < rows)), [said])

        @tf.custom_gradient
        def look_up(piece: Any) -> Any:
            with compat.stop_recording(), after(inside), how.recorded():
                found, fetched = self._fetch(piece, tf.reshape(indices, [-1]), name)

            def backward(grad: Any) -> Any:
                how.connected(self.variable)
                with compat.stop_recording(), how.recorded():
                    return self._send(tf.reshape(grad, [-1, self._width]), fetched, name, weigh)

            shape = tf.concat([tf.shape(indices), tf.constant(size, tf.int32)], 0)
            found = tf.reshape(found, shape)
            found.set_shape([*indices.shape, *size])
            return found, backward

        return look_up(self.bucket.pieces()[0])

    def _fetch(self, piece: Any, indices: Any, name: str) -> tuple[Any, _Fetched]:
        wire, rank = self._wire, self._wire.rank
        wanted = tf.sort(tf.unique(indices).y)
        place = tf.searchsorted(wanted, indices)
        stops = tf.searchsorted(wanted, tf.constant(self._stop, wanted.dtype))
        splits = stops - tf.concat([tf.zeros([1], stops.dtype), stops[:-1]], 0)
        asked, counts = wire.alltoall_rows(wanted, splits, f"{name}/indices")
        asked = asked - tf.constant(self._first[rank], asked.dtype)
        with after(asked):
            rows = tf.gather(self._rows(piece, f"{name}/heads"), asked)
        got, _ = wire.alltoall_rows(rows, counts, f"{name}/rows")
        return tf.gather(got, place), _Fetched(place, wanted, splits, asked)

    def _send(self, grad: Any, fetched: _Fetched, name: str, weigh: Any) -> Any:
        """This rank's part of the gradient's sum, from the gradients of the batch's rows."""
        count = tf.shape(fetched.wanted)[0]
        rows = weigh(tf.math.unsorted_segment_sum(grad, fetched.place, count))
        sent, _ = self._wire.alltoall_rows(rows, fetched.splits, f"{name}/gradients")
        self._wire.keep(tf.zeros([1]) + tf.cast(tf.size(sent), tf.float32))
        rank = self._wire.rank
        own = self._stop[rank] - self._first[rank]
        total = tf.math.unsorted_segment_sum(arrays.widen(sent), fetched.asked, own)
        return self._split(tf.reshape(total, [-1]), f"{name}/tails")

    # -- rows that lie on two ranks ---------------------------------------------------------------

    def _rows(self, piece: Any, name: str) -> Any:
        """This rank's rows, the last one completed by the next rank."""
        rank = self._wire.rank
        own = piece[self._heads[rank] :]
        if any(self._heads):
            heads = self._exchange(piece[: self._heads[rank]], name)
            tail = self._tails[rank]
            if tail:
                owner = next(r for r in range(rank + 1, len(self._heads)) if self._heads[r])
                own = tf.concat([own, heads[owner][:tail]], 0)
        return tf.reshape(own, [self._stop[rank] - self._first[rank], self._width])

    def _split(self, total: Any, name: str) -> Any:
        """The gradient of this rank's elements, from that of its rows."""
        if not any(self._heads):
            return total
        rank = self._wire.rank
        tail, head = self._tails[rank], self._heads[rank]
        kept = total[: total.shape[0] - tail]
        tails = self._exchange(total[total.shape[0] - tail :], name)
        if not head:
            return kept
        owner = next(r for r in reversed(range(rank)) if self._tails[r])
        return tf.concat([tails[owner][:head], kept], 0)

    def _exchange(self, part: Any, name: str) -> list[Any]:
        """Every rank's part of a row, padded to a row."""
        padded = tf.concat([part, tf.zeros([self._width - part.shape[0]], part.dtype)], 0)
        lengths = [self._width] * self._wire.size
        full = self._wire.allgather(self._wire.live(padded), lengths, name)
        self._wire.keep(full)
        bounds = itertools.pairwise(range(0, self._width * (self._wire.size + 1), self._width))
        return [full[start:stop] for start, stop in bounds]
