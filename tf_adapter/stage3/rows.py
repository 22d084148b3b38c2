"""Large embedding tables, sharded by rows: a batch fetches the rows it needs and no others.

A rank asks the owners for its rows, by an alltoall of indices, and gets them by an alltoall of
rows. In backward the rows of gradients travel to their owners. They stay rows, as tf.IndexedSlices,
until a part of the table is updated: nothing of the size of the table is ever made.
"""

from __future__ import annotations

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
from zerohvd.layout import ALIGN, Span

# Smaller tables are gathered: that is one collective instead of three.
ROWS_FROM_BYTES = 1 << 20
MOST_PADDING = 0.02


def is_large_table(layer: Any) -> bool:
    """Whether a layer looks up rows of a large table, and does nothing else."""
    if type(layer) is not keras.layers.Embedding or not layer.built:
        return False
    own = compat.own_weights(layer)
    large = len(own) == 1 and arrays.nbytes(own[0]) >= ROWS_FROM_BYTES
    return large and layer.quantization_mode is None and not layer.lora_enabled


def row_multiple(layer: Any, size: int) -> int:
    """Elements of a row, at which a table is cut; 1 where that would cost too much padding."""
    (table,) = compat.own_weights(layer)
    width = math.prod(table.shape[1:])
    padding = math.lcm(ALIGN, width) * size
    return width if padding <= MOST_PADDING * math.prod(table.shape) else 1


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
        self._width = bucket.width = math.prod(self.variable.shape[1:])
        self._spans = [Span(s.start // self._width, s.stop // self._width)
                       for s in bucket.spans_of(0)]

    @classmethod
    def of(cls, bucket: UnitBucket, wire: Wire) -> RowTable | None:
        """The table, if every row lies on one rank."""
        width = math.prod(bucket.variables[0].shape[1:])
        cuts = [c for s in bucket.spans_of(0) if s.length for c in s]
        if len(bucket.variables) != 1 or any(c % width for c in cuts):
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
        def look_up(table: Any) -> Any:
            with compat.stop_recording(), after(inside), how.recorded():
                found, fetched = self._fetch(table, tf.reshape(indices, [-1]), name)

            def backward(grad: Any) -> Any:
                how.connected(self.variable)
                with compat.stop_recording(), how.recorded():
                    return self._send(tf.reshape(grad, [-1, self._width]), fetched, name, weigh)

            shape = tf.concat([tf.shape(indices), tf.constant(size, tf.int32)], 0)
            found = tf.reshape(found, shape)
            found.set_shape([*indices.shape, *size])
            return found, backward

        (piece,) = self.bucket.stored
        # A tape watches a variable that is read; the function is given its handle, as the value of
        # all rows would be a copy.
        piece.sparse_read(tf.zeros([0], tf.int32))
        return look_up(piece.handle)

    def _fetch(self, table: Any, indices: Any, name: str) -> tuple[Any, _Fetched]:
        wire, dtype = self._wire, compat.stored_dtype(self.variable)
        wanted = tf.sort(tf.unique(indices).y)
        place = tf.searchsorted(wanted, indices)
        ends = tf.constant([span.stop for span in self._spans], wanted.dtype)
        stops = tf.searchsorted(wanted, ends)
        splits = stops - tf.concat([tf.zeros([1], stops.dtype), stops[:-1]], 0)
        asked, counts = wire.alltoall_rows(wanted, splits, f"{name}/indices")
        asked = asked - tf.constant(self._spans[wire.rank].start, asked.dtype)
        rows = tf.raw_ops.ResourceGather(resource=table, indices=asked, dtype=dtype)
        got, _ = wire.alltoall_rows(rows, counts, f"{name}/rows")
        return tf.gather(got, place), _Fetched(place, wanted, splits, asked)

    def _send(self, grad: Any, fetched: _Fetched, name: str, weigh: Any) -> Any:
        """This rank's part of the gradient's sum, as rows, from the gradients of the batch's."""
        count = tf.shape(fetched.wanted)[0]
        rows = weigh(tf.math.unsorted_segment_sum(grad, fetched.place, count))
        sent, _ = self._wire.alltoall_rows(rows, fetched.splits, f"{name}/gradients")
        # A rank whose rows nobody wants would prune it, and the others wait.
        self._wire.keep(tf.zeros([1]) + tf.cast(tf.size(sent), tf.float32))
        shape = [self._spans[self._wire.rank].length, self._width]
        return tf.IndexedSlices(arrays.widen(sent), fetched.asked, tf.constant(shape, tf.int64))
