"""Moving averages of the model's variables (`use_ema`), sharded like all other state."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.params.shards import ShardedVariables
from zerohvd.layout import Bucket


def update(inner: Any, shards: ShardedVariables) -> list[Any]:
    """Take in the variables as they are after a step, and overwrite them where that is due;
    returns operations to wait for."""
    for piece in shards.pieces:
        piece.load()
    compat.update_averages(inner, shards.pieces)
    for piece in shards.pieces:
        piece.drop()
    every = inner.ema_overwrite_frequency
    if not every:
        return []
    due = tf.equal((tf.convert_to_tensor(inner.iterations) + 1) % every, 0)

    def overwrite() -> Any:
        with shards.wire.traffic.branch("average"):
            done = write(inner, shards)
        with after(done):
            return tf.constant(True)

    return [tf.cond(due, overwrite, lambda: tf.constant(False))]


def write(inner: Any, shards: ShardedVariables) -> list[Any]:
    """Overwrite the model's variables with the averages; returns operations to wait for."""
    averages = compat.averages(inner)

    def prepare(bucket: Bucket) -> None:
        for index in shards.indices_in(bucket):
            shards.pieces[index].set(averages[index].value)

    return shards.assign_all(prepare)


def swap(inner: Any, shards: ShardedVariables) -> None:
    """Exchange the averages and the model's variables; eager only."""
    before = _current(shards)
    write(inner, shards)
    for average, value in zip(compat.averages(inner), before, strict=True):
        average.assign(value)


def keep(inner: Any, shards: ShardedVariables) -> None:
    """Set the averages to the model's variables; eager only."""
    for average, value in zip(compat.averages(inner), _current(shards), strict=True):
        average.assign(value)


def _current(shards: ShardedVariables) -> list[Any]:
    values = []
    for piece in shards.pieces:
        piece.load()
        values.append(tf.identity(piece.read_value()))
        piece.drop()
    return values
