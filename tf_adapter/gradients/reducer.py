"""The gradients' way: from this rank's gradients to the mean gradients of the pieces it owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras.gradients import ops, sparse
from zerohvd.keras.params import buffers
from zerohvd.layout import Bucket, Piece, Span


class Reduction:
    """How the gradients of one step are reduced.

    Args:
        step: Whose.
        after: What to wait for before anything is sent.
        scale: The gradients are so many times what they should be; None: they are as they should.
        weight: How much this rank counts; None: as much as any other.
        in_loss: Whether the gradients have been multiplied with the weight already.
    """

    def __init__(
        self, step: Any, after: Sequence[Any], scale: Any, weight: Any, in_loss: bool
    ) -> None:
        self._step, self._wire, self._scale = step, step.wire, scale
        self._weight, self._after = weight, after
        self._weigh = _weighing(weight, in_loss)
        # What turns the sum over the ranks into their mean; None: nothing to do, or not known yet.
        self._factor: Any = None
        if weight is None and self._wire.size > 1:
            self._factor = 1.0 / self._wire.size

    def locally(self, grads: Sequence[Any]) -> list[Any]:
        """Gradients to be added up on this rank before `bucket` reduces their sum."""
        found = [g if g is None else self._weigh(ops.dense(g)) for g in grads]
        if self._weight is not None:
            self._add_up_weights(self._after)
            # The batches that are added up may differ in weight: each counts as one, as in Keras,
            # so each is divided by its own.
            found = [ops.times(g, self._factor) for g in found]
            self._weight, self._weigh, self._factor = None, ops.as_it_is, None
        if self._scale is not None:
            found = [ops.divided(g, self._scale) for g in found]
            self._scale = None
        return found

    def bucket(self, bucket: Bucket, grads: Sequence[Any]) -> list[Any]:
        """The mean gradient of each piece of this rank in the bucket."""
        step = self._step
        pieces = step.pieces_in(bucket)
        wire_dtype = tf.as_dtype(step.config.reduce_dtype or bucket.dtype)
        slot = bucket.slots[0]

        def mean(total: Any) -> Any:
            # Every step begins with a bucket: whoever trains while another rank saves, is refused
            # there, and must not have left anything on its way (see `entry`).
            self._add_up_weights([*self._after, total])
            return self._mean(total, pieces[0].dtype) if pieces else total

        spans = [p.piece for p in pieces]
        if sparse.applies(bucket, step.layout.params[slot.param], grads[slot.param]):
            owned = [_together(spans)] if spans else []
            found = sparse.reduce(
                self._wire,
                step.name_of(bucket, "sparse"),
                ops.cast(grads[slot.param].map(self._weigh), wire_dtype),
                owned[0].param_span if owned else None,
                lambda: self._dense(bucket, grads, wire_dtype, owned, lambda g: g),
            )
            if owned:
                total, start = mean(found[0]), owned[0].param_span.start
                found = [buffers.cut(total, s.param_span.shift(-start)) for s in spans]
            self._add_up_weights(self._after)
        else:
            found = self._dense(bucket, grads, wire_dtype, spans, mean)
        return [
            tf.reshape(grad, piece.shape) if step.updates(piece.piece.param) else None
            for piece, grad in zip(pieces, found, strict=True)
        ]

    def _mean(self, total: Any, dtype: Any) -> Any:
        total = tf.cast(total, dtype)
        if self._factor is not None:
            total *= tf.cast(self._factor, dtype)
        return total if self._scale is None else total / tf.cast(self._scale, dtype)

    def _dense(
        self,
        bucket: Bucket,
        grads: Sequence[Any],
        dtype: Any,
        pieces: Sequence[Piece],
        mean: Callable[[Any], Any],
    ) -> list[Any]:
        step, wire = self._step, self._wire
        flats = {
            slot.param: tf.reshape(ops.dense(grads[slot.param]), [-1])
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
        if step.layout.size == 1:
            reduced = wire.allreduce(packed, step.name_of(bucket, "allreduce"))
        else:
            lengths = [span.length for span in bucket.spans()]
            reduced = wire.reducescatter(packed, lengths, step.name_of(bucket, "reducescatter"))
        if not any(step.updates(p.param) for p in pieces):
            wire.keep(reduced)
        # Of the whole, which can be changed in place; a part of it could not.
        reduced = mean(reduced)
        start = bucket.span(step.rank).start
        return [buffers.cut(reduced, p.bucket_span.shift(-start)) for p in pieces]

    def _add_up_weights(self, after: Sequence[Any]) -> None:
        """Find the factor, once."""
        if self._weight is None or self._factor is not None:
            return
        wire = self._wire
        with tf.control_dependencies(ops.to_wait_for(list(after))):
            total = wire.allreduce(tf.reshape(self._weight, [1]), self._step.weight_name)
        wire.keep(total)
        self._factor = tf.math.divide_no_nan(1.0, total[0])


def _weighing(weight: Any, in_loss: bool) -> Callable[[Any], Any]:
    """What makes of a gradient this rank's contribution to the sum.

    A rank of weight 0 contributes zeros, whatever its gradients are: the loss of no samples may
    well have been NaN.
    """
    if weight is None:
        return ops.as_it_is
    if in_loss:
        counts = weight > 0
        return lambda g: tf.cond(counts, lambda: g, lambda: tf.zeros_like(g))
    return lambda g: tf.math.multiply_no_nan(g, tf.cast(weight, g.dtype))


def _together(parts: Sequence[Piece]) -> Piece:
    """What the parts, which follow each other in one parameter, are parts of."""
    first, last = parts[0], parts[-1]
    return first._replace(
        param_span=Span(first.param_span.start, last.param_span.stop),
        bucket_span=Span(first.bucket_span.start, last.bucket_span.stop),
    )
