"""Dynamic loss scaling as keras.optimizers.LossScaleOptimizer does it, agreed by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras.communication.wire import Wire


def all_finite(grads: Sequence[Any], wire: Wire) -> Any:
    """Whether no rank has seen an infinity or a NaN; the same answer on all ranks."""
    flags = [tf.reduce_all(tf.math.is_finite(g)) for g in grads if g is not None]
    mine = tf.cast(tf.reduce_all(tf.stack(flags)), tf.float32) if flags else tf.ones([])
    return wire.allreduce(tf.reshape(mine, [1]), f"{wire.prefix}/finite", op="min")[0] > 0


def grow(scaler: Any) -> None:
    """After a finite step: count it, and double the scale after `dynamic_growth_steps`."""
    due = tf.equal(scaler.step_counter.value, scaler.dynamic_growth_steps - 1)
    scale, counter = scaler.dynamic_scale.value, scaler.step_counter.value
    scale.assign(tf.where(due, scale * 2.0, scale))
    counter.assign(tf.where(due, tf.zeros_like(counter), counter + 1))


def back_off(scaler: Any) -> None:
    """After an overflow: halve the scale and count from 0."""
    scaler.step_counter.assign(0)
    scaler.dynamic_scale.assign(scaler.dynamic_scale.value * 0.5)
