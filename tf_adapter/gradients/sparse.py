"""Gradients of embedding tables (tf.IndexedSlices): sent as rows where that is fewer bytes.

How many rows a rank has is only known when the step runs, and differs between ranks. So the ranks
agree on the sum, and all of them take the same branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from zerohvd.keras.communication import arrays
from zerohvd.keras.communication.wire import Wire
from zerohvd.layout import Bucket, ParamSpec, Span


class Rows(NamedTuple):
    """A gradient as rows of a table; unlike tf.IndexedSlices, with a static shape."""

    values: Any
    indices: Any
    shape: tuple[int, ...]

    def map(self, function: Callable[[Any], Any]) -> Rows:
        return self._replace(values=function(self.values))

    def dense(self) -> Any:
        return tf.math.unsorted_segment_sum(self.values, self.indices, self.shape[0])

    def dense_part(self, first: int, stop: int) -> Any:
        """The rows from `first` to `stop` as one tensor, 1-D."""
        return tf.reshape(_sum_of(self.values, self.indices, first, stop), [-1])


def dense(grad: Any) -> Any:
    """A gradient as one tensor."""
    return grad.dense() if isinstance(grad, Rows) else grad


def of_static_shape(grad: Any, shape: Any) -> Any:
    """A gradient whose shape is known while tracing: IndexedSlices become Rows.

    TensorFlow loses the shape where a layer multiplies a batch of unknown size by its kernel in
    more than two dimensions, such as Dense on every token; buckets are cut by static shapes.
    """
    if grad is None:
        return None
    shape = tuple(shape)
    if not isinstance(grad, tf.IndexedSlices):
        grad = tf.convert_to_tensor(grad)
        return grad if grad.shape.is_fully_defined() else tf.ensure_shape(grad, shape)
    values = tf.reshape(grad.values, [-1, *shape[1:]])
    return Rows(values, tf.reshape(grad.indices, [-1]), shape)


def is_rows(grad: Any) -> bool:
    """Whether a gradient comes as rows of a table."""
    return isinstance(grad, (Rows, tf.IndexedSlices))


def alone(bucket: Bucket, spec: ParamSpec) -> bool:
    """Whether the bucket holds nothing but the whole of this variable."""
    return len(bucket.slots) == 1 and bucket.slots[0].length == spec.numel


def applies(bucket: Bucket, spec: ParamSpec, grad: Any) -> bool:
    """Whether the bucket holds nothing but a variable whose gradient came as rows."""
    return alone(bucket, spec) and isinstance(grad, Rows)


def reduce(
    wire: Wire, name: str, grad: Rows, span: Span | None, as_table: Callable[[], list[Any]]
) -> list[Any]:
    """The sum over the ranks of what this rank owns of the gradient, 1-D.

    `span` is what it owns of the flattened variable, None if nothing; `as_table` reduces the dense
    gradient instead.
    """
    if wire.size == 1:
        return as_table()
    rows = tf.shape(grad.indices, out_type=tf.int64)[:1]
    all_rows = wire.allreduce(rows, f"{name}/count")[0]
    width = math.prod(grad.shape[1:])
    row_bytes = width * grad.values.dtype.size
    # Every row goes to every other rank; of the table, every rank sends all but its own shard.
    rows_bytes = all_rows * (row_bytes + grad.indices.dtype.size)
    table_bytes = grad.shape[0] * row_bytes
    traffic = wire.traffic
    length = 0 if span is None else span.length

    def by_rows() -> Any:
        with traffic.branch(f"{name}/rows"):
            indices = wire.allgather_rows(grad.indices, f"{name}/indices")
            values = wire.allgather_rows(grad.values, f"{name}/values")
            if span is None:
                wire.keep(indices)
                wire.keep(values)
        return _add_up(indices, values, span, width)

    def by_table() -> Any:
        with traffic.branch(f"{name}/table"):
            found = as_table()
        return arrays.widen(found[0] if found else tf.zeros([0], grad.values.dtype))

    total = tf.cond(rows_bytes < table_bytes, by_rows, by_table)
    total.set_shape([length])
    return [] if span is None else [total]


def _add_up(indices: Any, values: Any, span: Span | None, width: int) -> Any:
    """The sum of all ranks' rows, of this rank's part of the table."""
    values = arrays.widen(values)
    if span is None:
        return tf.zeros([0], values.dtype)
    first, stop = span.start // width, -(-span.stop // width)
    flat = tf.reshape(_sum_of(values, indices, first, stop), [-1])
    return flat[span.start - first * width : span.stop - first * width]


def _sum_of(values: Any, indices: Any, first: int, stop: int) -> Any:
    """The rows from `first` to `stop` of a table."""
    # unsorted_segment_sum drops negative ids: rows of other ranks.
    inside = (indices >= first) & (indices < stop)
    ids = tf.where(inside, indices - first, -tf.ones_like(indices))
    return tf.math.unsorted_segment_sum(values, ids, stop - first)
