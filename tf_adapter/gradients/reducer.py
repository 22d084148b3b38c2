"""Gradients from their arrival to the mean gradients of the pieces that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras.communication import arrays
from zerohvd.keras.communication.ordering import Window, after
from zerohvd.keras.gradients import sparse
from zerohvd.keras.params import buffers
from zerohvd.keras.params.pieces import PieceVariable, shard_of
from zerohvd.keras.params.shards import ShardedVariables
from zerohvd.layout import Bucket, ParamSpec, Piece
from zerohvd.training.present import Present, agree_on_present

_Function = Callable[[Any], Any]


class GradReducer:
    """Owns the gradients of one optimizer: which there are, and what is accumulated of them.

    Args:
        shards: The variables that the gradients belong to.
        reduce_dtype: The dtype in which gradients are sent; None: that of their bucket.
        steps: How many steps are accumulated for an update, at first.
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
        self.shards, self.reduce_dtype = shards, reduce_dtype
        self.accumulates = steps > 1  # whether there is memory for sums of gradients
        self.local_sums: list[tf.Variable] = []
        if steps > 1 and sharded_sums is None:
            with tf.init_scope():
                self.local_sums = [
                    tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False, name="gradient_sum")
                    for v in shards.variables
                ]
        self._sums = self.local_sums if sharded_sums is None else sharded_sums
        # What the ranks said of their gradients in the first step; None: it has not come yet.
        self.present: Present | None = None
        self.weighted = False  # whether the last step that was called or traced had a weight
        self.window = Window(shards.layout)

    def agree_on_present(self, grads: Sequence[Any], weighted: bool) -> Present | None:
        """Compare on all ranks, in the first step, which variables have gradients on any rank;
        None in later steps, where a rank knows no more than its own."""
        if self.present is not None and self.shards.wire.size > 1:
            return None
        with tf.init_scope():
            rows = {i: g.indices.dtype.name for i, g in enumerate(grads) if sparse.is_rows(g)}
            mine = [i for i, g in enumerate(grads) if g is not None]
            ranks = self.shards.wire.eager
            self.present = agree_on_present(ranks, mine, rows, weighted=weighted)
        return self.present

    @property
    def weight_name(self) -> str:
        """The name of the collective that adds up the ranks' weights, and which gradients they
        have."""
        return f"{self.shards.wire.prefix}/weight"

    # -- gradient accumulation --------------------------------------------------------------------

    def accumulate(self, grads: Sequence[Any]) -> None:
        for g, s in zip(grads, self._sums, strict=True):
            if g is not None:
                s.assign(s + tf.cast(g, s.dtype))

    def means_with(self, grads: Sequence[Any], steps: int) -> list[Any]:
        """The means over `steps` accumulated steps, of which `grads` are the last one's."""
        return [
            None if g is None else (tf.cast(g, s.dtype) + s) / steps
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
            sparse.of_static_shape(g, _gradient_shape(v))
            for g, v in zip(grads, variables, strict=True)
        ]
        self.heads = first_of(self.grads)
        self._has = [g is not None for g in self.grads]
        self._counts: Any = None  # how many ranks have a gradient of each variable
        self._as_rows = True  # whether a gradient that is missing here may be rows elsewhere
        self._scale, self._weight = scale, weight
        self._weigh = weighing(weight, in_loss)
        # What turns the sum over the ranks into their mean; None: 1, or not known yet.
        self._factor: Any = None
        if weight is None and self._wire.size > 1:
            self._factor = 1.0 / self._wire.size

    def locally(self) -> list[Any]:
        """Gradients to be accumulated on this rank before `all` reduces their sum."""
        self._as_rows = False
        found = [g if g is None else self._weigh(sparse.dense(g)) for g in self.grads]
        if self._weight is not None:
            self._add_up(self.heads)
            # The batches that are accumulated may differ in weight: each counts as one, as in
            # Keras, so each is divided by its own.
            found = [_scaled(g, self._factor) for g in found]
            self._weight, self._weigh, self._factor = None, _unchanged, None
        if self._scale is not None:
            found = [g if g is None else g / tf.cast(self._scale, g.dtype) for g in found]
            self._scale = None
        return found

    def given(self, param: int) -> Any:
        """Whether any rank has a gradient of the variable: a bool, or a tensor where this rank has
        none, once the first bucket has been reduced."""
        if self._has[param] or self._wire.size == 1:
            return self._has[param]
        return self._counts[param] > 0

    @property
    def counts(self) -> Any:
        """How many ranks have a gradient of each variable, once the first bucket is reduced."""
        return self._counts

    def take_counts(self, counts: Any) -> None:
        """Replace `counts` by a tensor that is known outside of the branch that made them."""
        self._counts = counts

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
            self._add_up([*self.heads, total])
            return self._mean(total, pieces[0].dtype) if pieces else total

        spec = self._shards.layout.params[param]
        kept = self._shards.is_kept(bucket)
        if not kept and self._expects_rows(bucket, spec, grads[param]):
            # The other ranks begin with the number of rows, and would wait for ours.
            grads = list(grads)
            grads[param] = self._no_rows(param, spec)
        if kept:
            # Also on a rank without a piece here: eager collectives have one order on all ranks.
            self.add_up()
            found = [mean(self._own_part(piece, grads)) for piece in pieces]
        elif sparse.applies(bucket, spec, grads[param]):
            together = [owned[0].joined(owned[-1])] if owned else []
            found = self._sparse(bucket, grads, together)
            if owned:
                total, start = mean(found[0]), together[0].param_span.start
                found = [buffers.cut(total, p.param_span.shift(-start)) for p in owned]
            self._add_up(self.heads)
        else:
            found = self._dense(bucket, grads, owned, mean)
        return [
            None if self.given(piece.piece.param) is False else arrays.reshape(grad, piece.shape)
            for piece, grad in zip(pieces, found, strict=True)
        ]

    def add_up(self) -> None:
        """Agree with the other ranks on weights, and on which gradients there are."""
        self._add_up(self.heads)

    def piece(self, piece: PieceVariable) -> Any:
        """The gradient of one piece of a sharded variable, None if no rank has one; after `add_up`.
        It is a sum: `mean` is left to the update, whose operations TensorFlow joins with it."""
        if self.given(piece.piece.param) is False:
            return None
        return arrays.reshape(self._own_part(piece, self.grads), piece.shape)

    def mean(self, total: Any, piece: PieceVariable) -> Any:
        """The mean gradient of a piece, from `piece`."""
        return self._mean(total, piece.dtype)

    def _expects_rows(self, bucket: Bucket, spec: ParamSpec, grad: Any) -> bool:
        """Whether this rank lacks a gradient that others may send as rows."""
        param, present = bucket.slots[0].param, self._reducer.present
        missing = grad is None and self._as_rows and self._wire.size > 1
        if not missing or present is None or not sparse.alone(bucket, spec):
            return False
        return present.expects_rows(param, bool(spec.group))

    def _no_rows(self, param: int, spec: ParamSpec) -> sparse.Rows:
        assert self._reducer.present is not None
        indices = self._reducer.present.rows.get(param, "int32")
        values = self._wire.live(tf.zeros([0, *spec.shape[1:]], spec.dtype))
        return sparse.Rows(values, tf.zeros([0], indices), spec.shape)

    def _own_part(self, piece: PieceVariable, grads: Sequence[Any]) -> Any:
        """The gradient of a piece whose unit has summed it over the ranks already (stage 3)."""
        grad, shard = grads[piece.piece.param], shard_of(piece.variable)
        if grad is None:
            return tf.zeros([piece.piece.param_span.length], piece.dtype)
        if isinstance(grad, sparse.Rows):
            span = piece.piece.param_span.shift(-shard.span.start)
            return grad.dense_part(span.start // shard.width, span.stop // shard.width)
        return buffers.cut(grad, piece.piece.param_span.shift(-shard.span.start))

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
        params = shards.layout.params
        flats = {
            slot.param: arrays.reshape(sparse.dense(grads[slot.param]), [params[slot.param].numel])
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
        if not pieces:
            wire.keep(reduced)
        # TensorFlow scales the whole tensor in place; slices of it would be copied.
        reduced = mean(reduced)
        start = bucket.span(shards.rank).start
        return [buffers.cut(reduced, p.bucket_span.shift(-start)) for p in pieces]

    def _add_up(self, wait_for: Sequence[Any]) -> None:
        """Add up, once per step, the weights, and how many ranks have which gradient."""
        if self._counts is not None or (self._wire.size == 1 and self._weight is None):
            return
        weight = [] if self._weight is None else [self._weight]
        wish = tf.convert_to_tensor(self._wire.wish)
        mine = tf.stack([*weight, *(float(has) for has in self._has), wish])
        with after(wait_for):
            total = self._wire.add_flags(mine, self._reducer.weight_name)
        self._wire.heard.assign(total[-1])  # so that it is not pruned where nobody uses the rest
        self._counts = total[len(weight) : -1]
        if weight:
            self._factor = tf.math.divide_no_nan(1.0, total[0])


def _gradient_shape(variable: Any) -> Any:
    shard = shard_of(variable)
    return variable.shape if shard is None else shard.piece.shape


def first_of(grads: Sequence[Any]) -> list[Any]:
    """The gradient that backward computes first, if there is any: the last variable's."""
    present = (g for g in reversed(grads) if g is not None)
    return [g.values if isinstance(g, sparse.Rows) else g for g in present][:1]


def weighing(weight: Any, in_loss: bool) -> _Function:
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
