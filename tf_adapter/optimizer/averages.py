"""Moving averages of the model's variables (`use_ema`), shared out like all other state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras.gradients import ops
from zerohvd.keras.params import buffers


def update(step: Any) -> list[Any]:
    """Take in the variables as they are after a step, and overwrite them where that is due."""
    for piece in step.pieces:
        piece.load()
    step.inner._update_model_variables_moving_average(step.pieces)
    for piece in step.pieces:
        piece.drop()
    every = step.inner.ema_overwrite_frequency
    if not every:
        return []
    due = tf.equal((tf.convert_to_tensor(step.inner.iterations) + 1) % every, 0)

    def overwrite() -> Any:
        with step.wire.plan.section("average"):
            done = write(step)
        with tf.control_dependencies(ops.to_wait_for(done)):
            return tf.constant(True)

    return [tf.cond(due, overwrite, lambda: tf.constant(False))]


def write(step: Any) -> list[Any]:
    """Put the averages into the model's variables."""
    assembled = buffers.Assembly(step.layout, step.natives)
    done: list[Any] = []
    for bucket in step.layout.buckets:
        # One after the other, or Horovod would fuse them, in a buffer of 128 MiB by default.
        with tf.control_dependencies(ops.to_wait_for(done[-1:])):
            for index in step.indices_in(bucket):
                step.pieces[index].set(_averages(step)[index].value)
            done.append(step.gather(bucket, assembled))
    return done


def swap(step: Any) -> None:
    """Exchange the averages and the model's variables; eager only."""
    before = _current(step)
    write(step)
    for average, value in zip(_averages(step), before, strict=True):
        average.assign(value)


def keep(step: Any) -> None:
    """Take the model's variables as averages; eager only."""
    for average, value in zip(_averages(step), _current(step), strict=True):
        average.assign(value)


def _averages(step: Any) -> Sequence[Any]:
    return step.inner._model_variables_moving_average


def _current(step: Any) -> list[Any]:
    values = []
    for piece in step.pieces:
        piece.load()
        values.append(tf.identity(piece.read_value()))
        piece.drop()
    return values
