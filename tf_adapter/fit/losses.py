"""Losses that are no means over samples, on this rank's part of a batch.

Gradients are averaged over the ranks, each counted by its samples. That is right for a mean over
samples. A sum, a mean over unmasked tokens or one that is divided by the sample weights has another
denominator: such a loss is multiplied on each rank with a factor that makes the average of the
ranks' losses the loss of the whole batch. Only the ranks together know the factor, so each such
loss adds up two numbers over the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.communication.ordering import after

_SUM, _BY_WEIGHT = "sum", "mean_with_sample_weight"


@contextlib.contextmanager
def of_whole_batches(process_set: Any, count: Any, weight: Any) -> Iterator[list[str]]:
    """Correct all losses of a step that is called or traced inside.

    Args:
        process_set: The ranks that share a batch; None: all of them.
        count: How many samples this rank has; a tensor.
        weight: How much the rank counts in the average; None: as much as any other.

    Yields:
        The names of the collectives, as they come.
    """
    module, name = compat.loss_reduction()
    original = getattr(module, name)
    names: list[str] = []
    share = tf.ones([]) if weight is None else tf.cast(weight, tf.float32)

    def reduce(values: Any, sample_weight: Any = None, mask: Any = None,
               reduction: Any = "sum_over_batch_size", dtype: Any = None) -> Any:  # fmt: skip
        loss = original(values, sample_weight, mask, reduction, dtype)
        divisor = _divisor(values, sample_weight, mask, reduction, loss.dtype)
        if divisor is None:
            return loss
        names.append(f"zero.loss.{len(names)}")
        divisor = tf.where(count > 0, tf.cast(divisor, tf.float32), 0.0)
        with after([count]):
            total = add_up(tf.stack([divisor, share]), names[-1], process_set)
        part = 1.0 if reduction == _SUM else tf.math.divide_no_nan(divisor, total[0])
        return loss * tf.cast(part * tf.math.divide_no_nan(total[1], share), loss.dtype)

    setattr(module, name, reduce)
    try:
        yield names
    finally:
        setattr(module, name, original)


def _divisor(values: Any, weights: Any, mask: Any, reduction: Any, dtype: Any) -> Any:
    """What the loss has been divided by; None: by the number of samples, or by nobody knows what.

    A number, such as a loss function of the user's may return, has been reduced already.
    """
    if not tf.convert_to_tensor(values).shape.rank or reduction in (None, "none"):
        return None
    if reduction == _SUM:
        return tf.ones([])
    if reduction == _BY_WEIGHT and weights is not None:
        weights = tf.cast(weights, dtype)
        mask = None if mask is None else tf.cast(mask, dtype)
        return tf.reduce_sum(compat.masked_weights(weights, mask, dtype))
    return None if mask is None else tf.reduce_sum(tf.cast(mask, dtype))


def add_up(x: Any, name: str, process_set: Any) -> Any:
    """The sum of a tensor of static shape over the ranks that share a batch."""
    chosen = hvd.global_process_set if process_set is None else process_set
    options = {"name": name, "ignore_name_scope": True, "process_set": chosen}
    total = hvd.allreduce(x, op=hvd.Sum, **options)
    total.set_shape(x.shape)
    return total
