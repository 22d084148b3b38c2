"""Dynamic loss scaling as keras.optimizers.LossScaleOptimizer does it, on its variables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def grow(scaler: Any) -> None:
    """After a good step, as keras' LossScaleOptimizer: double the scale now and then."""
    due = tf.equal(scaler.step_counter.value, scaler.dynamic_growth_steps - 1)
    scale, counter = scaler.dynamic_scale.value, scaler.step_counter.value
    scale.assign(tf.where(due, scale * 2.0, scale))
    counter.assign(tf.where(due, tf.zeros_like(counter), counter + 1))


def back_off(scaler: Any) -> None:
    scaler.step_counter.assign(0)
    scaler.dynamic_scale.assign(scaler.dynamic_scale.value * 0.5)
