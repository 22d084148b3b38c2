"""Gradients from their arrival to the mean gradients of the pieces that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras.communication.ordering import Window, after
from zerohvd.keras.gradients import sparse
from zerohvd.keras.params import buffers
from zerohvd.keras.params.pieces import variable_path
from zerohvd.keras.params.shards import ShardedVariables
from zerohvd.layout import Bucket, Piece
from zerohvd.training.present import agree_on_present, check_present

_Function = Callable[[Any], Any]


class GradReducer:
    """Owns the gradients of one optimizer: which there are, and what is accumulated of them.

    Args:
        shards: The variables that the gradients belong to.
        reduce_dtype: The dtype in which gradients are sent; None: that of their bucket.
        steps: How many steps are accumulated for an update.
        sharded_sums: Accumulate reduced gradients in these, one per piece; None: accumulate whole
            gradients in `local_sums`, and reduce once per update (stages 0 and 1).
    """

    def __init__(
        self,
        shards: ShardedVariables,
        reduce_dtype: str | None,
        steps: int,
        sharded_sums: Sequence[tf.Variable] | None,
    ) -> None:
        self.shards, self.reduce_dtype, self.steps = shards, reduce_dtype, steps
        self.local_sums: list[tf.Variable] = []
        if steps > 1 and sharded_sums is None:
            with tf.init_scope():
                self.local_sums = [
                    tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False, name="gradient_sum")
                    for v in shards.variables
                ]
        self._sums = self.local_sums if sharded_sums is None else sharded_sums
        # Which variables get gradients; None until the first step, when the ranks compare.
        self.present: frozenset[int] | None = None
        # Which are frozen, and were not given to this step: not updated, as in Keras.
        self.frozen: frozenset[int] = frozenset()
        self.weighted = False  # whether the last step that was called or traced had a weight
        self.window = Window(shards.layout)

    def agree_on_present(self, grads: Sequence[Any], weighted: bool) -> bool:
        """Compare on all ranks, in the first step, which variables have gradients on any rank;
        returns whether this was the first step."""
        mine = [i for i, g in enumerate(grads) if g is not None]
        first = self.present is None
        if self.present is None:
            with tf.init_scope():
                ranks = self.shards.wire.eager
                self.present = agree_on_present(ranks, mine, weighted=weighted)
        check_present(mine, self.present, [variable_path(v) for v in self.shards.variables])
        return first

    def updates(self, param: int) -> bool:
        """Whether the step changes the variable."""
        return self.present is not None and param in self.present and param not in self.frozen

    @property
    def weight_name(self) -> str:
        """The name of the collective that adds up the ranks' weights."""
        return f"{self.shards.wire.prefix}/weight"

    # -- gradient accumulation --------------------------------------------------------------------

    def accumulate(self, grads: Sequence[Any]) -> None:
        for g, s in zip(grads, self._sums, strict=True):
            if g is not None:
                s.assign(s + tf.cast(g, s.dtype))

    def means_with(self, grads: Sequence[Any]) -> list[Any]:
        """The means over the accumulated steps and `grads`, the last one's."""
        return [
            None if g is None else (tf.cast(g, s.dtype) + s) / self.steps
            for g, s in zip(grads, self._sums, strict=True)
        ]

    def clear(self) -> None:
        for s in self._sums:
            s.assign(tf.zeros_like(s))


class Reduction:
    """Reduces the gradients of one step, one per variable or None; see `ShardedStep.run`.

    `scale` is what their loss was multiplied with. `heads` is what to wait for so as to run only in
    a step that has data: the last variable's gradient, which backward computes first.
    """

    def __init__(
        self, reducer: GradReducer, grads: Sequence[Any], scale: Any, weight: Any, in_loss: bool
    ) -> None:
        self._reducer, self._shards, self._wire = reducer, reducer.shards, reducer.shards.wire
        variables = reducer.shards.variables
        self.grads = [
            sparse.of_static_shape(g, v.shape) for g, v in zip(grads, variables, strict=True)
        ]
        self.heads = first_of(self.grads)
        self._scale, self._weight = scale, weight
        self._weigh = _weighing(weight, in_loss)
        # What turns the sum over the ranks into their mean; None: 1, or not known yet.
        self._factor: Any = None
        if weight is None and self._wire.size > 1:
            self._factor = 1.0 / self._wire.size

    def locally(self) -> list[Any]:
        """Gradients to be accumulated on this rank before `all` reduces their sum."""
        found = [g if g is None else self._weigh(sparse.dense(g)) for g in self.grads]
        if self._weight is not None:
            self._add_up_weights(self.heads)
            # The batches that are accumulated may differ in weight: each counts as one, as in
            # Keras, so each is divided by its own.
            found = [_scaled(g, self._factor) for g in found]
            self._weight, self._weigh, self._factor = None, _unchanged, None
        if self._scale is not None:
            found = [g if g is None else g / tf.cast(self._scale, g.dtype) for g in found]
            self._scale = None
        return found

    def all(self, grads: Sequence[Any]) -> list[Any]:
        """The mean gradient of each piece of this rank."""
        reduced: list[Any] = [None] * len(self._shards.pieces)
        started: list[Any] = []
        for bucket in self._shards.layout.buckets:
            with self._reducer.window.after(started):
                found = self.bucket(bucket, grads)
            started.append(found)
            for index, grad in zip(self._shards.indices_in(bucket), found, strict=True):
                reduced[index] = grad
        return reduced

    def bucket(self, bucket: Bucket, grads: Sequence[Any]) -> list[Any]:
        """The mean gradient of each piece of this rank in the bucket."""
        pieces = self._shards.pieces_in(bucket)
        owned = [p.piece for p in pieces]
        param = bucket.slots[0].param

        def mean(total: Any) -> Any:
            # After the first bucket: every step begins with that collective, which is refused if
            # another rank saves (see `entry`), and nothing else may be in flight then.
            self._add_up_weights([*self.heads, total])
            return self._mean(total, pieces[0].dtype) if pieces else total

        if sparse.applies(bucket, self._shards.layout.params[param], grads[param]):
            together = [owned[0].joined(owned[-1])] if owned else []
            found = self._sparse(bucket, grads, together)
            if owned:
                total, start = mean(found[0]), together[0].param_span.start
                found = [buffers.cut(total, p.param_span.shift(-start)) for p in owned]
            self._add_up_weights(self.heads)
        else:
            found = self._dense(bucket, grads, owned, mean)
        return [
            tf.reshape(grad, piece.shape) if self._reducer.updates(piece.piece.param) else None
            for piece, grad in zip(pieces, found, strict=True)
        ]

    def _mean(self, total: Any, dtype: Any) -> Any:
        total = _scaled(tf.cast(total, dtype), self._factor)
        return total if self._scale is None else total / tf.cast(self._scale, dtype)

    def _dtype(self, bucket: Bucket) -> Any:
        return tf.as_dtype(self._reducer.reduce_dtype or bucket.dtype)

    def _sparse(self, bucket: Bucket, grads: Sequence[Any], owned: Sequence[Piece]) -> list[Any]:
        """The sum of the ranks' rows, of the piece that this rank owns."""
        rows = grads[bucket.slots[0].param].map(self._weigh)
        return sparse.reduce(
            self._wire,
            self._shards.name_of(bucket, "sparse"),
            rows.map(lambda g: tf.cast(g, self._dtype(bucket))),
            owned[0].param_span if owned else None,
            lambda: self._dense(bucket, grads, owned, _unchanged),
        )

    def _dense(
        self, bucket: Bucket, grads: Sequence[Any], pieces: Sequence[Piece], mean: _Function
    ) -> list[Any]:
        """The gradient of each piece, after `mean` has been applied to the sum over the ranks."""
        shards, wire, dtype = self._shards, self._wire, self._dtype(bucket)
        flats = {
            slot.param: tf.reshape(sparse.dense(grads[slot.param]), [-1])
            for slot in bucket.slots
            if grads[slot.param] is not None
        }
        if wire.size == 1:
            return [
                mean(buffers.cut(self._weigh(flats[p.param]), p.param_span))
                if p.param in flats
                else mean(tf.zeros([p.param_span.length], dtype))
                for p in pieces
            ]
        packed = self._weigh(buffers.pack(bucket, flats, dtype))
        if not flats:
            packed = wire.live(packed)
        if shards.layout.size == 1:
            reduced = wire.allreduce(packed, shards.name_of(bucket, "allreduce"))
        else:
            name = shards.name_of(bucket, "reducescatter")
            reduced = wire.reducescatter(packed, bucket.lengths, name)
        if not any(self._reducer.updates(p.param) for p in pieces):
            wire.keep(reduced)
        # TensorFlow scales the whole tensor in place; slices of it would be copied.
        reduced = mean(reduced)
        start = bucket.span(shards.rank).start
        return [buffers.cut(reduced, p.bucket_span.shift(-start)) for p in pieces]

    def _add_up_weights(self, wait_for: Sequence[Any]) -> None:
        """Agree on the factor, once per step."""
        if self._weight is None or self._factor is not None:
            return
        with after(wait_for):
            total = self._wire.allreduce(tf.reshape(self._weight, [1]), self._reducer.weight_name)
        self._wire.keep(total)
        self._factor = tf.math.divide_no_nan(1.0, total[0])


def first_of(grads: Sequence[Any]) -> list[Any]:
    """The gradient that backward computes first, if there is any: the last variable's."""
    present = (g for g in reversed(grads) if g is not None)
    return [g.values if isinstance(g, sparse.Rows) else g for g in present][:1]


def _weighing(weight: Any, in_loss: bool) -> _Function:
    """The function from a gradient to this rank's contribution to the sum.

    A rank of weight 0 contributes zeros whatever its gradients are: the loss of an empty batch may
    be NaN.
    """
    if weight is None:
        return _unchanged
    if in_loss:
        counts = weight > 0
        return lambda g: tf.cond(counts, lambda: g, lambda: tf.zeros_like(g))
    return lambda g: tf.math.multiply_no_nan(g, tf.cast(weight, g.dtype))


def _unchanged(grad: Any) -> Any:
    return grad


def _scaled(grad: Any, factor: Any) -> Any:
    if grad is None or factor is None:
        return grad
    return grad * tf.cast(factor, grad.dtype)
