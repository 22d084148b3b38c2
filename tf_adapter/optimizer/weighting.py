"""Ranks with unequal batches: how much each rank's gradient counts."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from zerohvd.communication.weighting import Announced, check_weight

_announced = Announced()  # may be a tensor of a graph
_outside: list[tf.Variable] = []  # holds the last weight that was announced outside of graphs

held = _announced.during
holding = _announced.holding
may_enter_loss = _announced.may_enter_loss
clear = _announced.clear
put_into_loss = _announced.put_into_loss
is_in_loss = _announced.is_in_loss
will_be_in_loss = _announced.will_be_in_loss


class weight:
    """Say how much this rank counts in the next step.

    Gradients are averages over the rank's own batch; with the number of its samples as the
    weight, the result equals one process on the union of all samples. Every rank has to give a
    weight, 0 where it has no samples; a tensor will do, such as `tf.shape(x)[0]`.

        zero.weight(n); opt.apply_gradients(...)              # until the next apply
        with zero.weight(n): opt.apply_gradients(...)         # the same
        zero.weight(n); model.train_on_batch(x, y)            # before each of them

    Give it before every step or before none: a step that has been traced without a weight knows
    of none later, and ranks that count would wait for those that do not.
    """

    def __init__(self, value: Any) -> None:
        self.value = value if tf.is_tensor(value) else check_weight(value)
        self.__enter__()

    def __enter__(self) -> weight:
        _announced.value = self.value
        if tf.executing_eagerly():
            # A step traced once, such as train_on_batch, must find the number of each later call.
            if not _outside:
                _outside.append(tf.Variable(0.0, trainable=False, name="weight"))
            _outside[0].assign(tf.cast(self.value, tf.float32))
        return self

    def __exit__(self, *_: object) -> None:
        _announced.value = None


def take() -> Any:
    """The announced weight as a float32 tensor, or None; it is used up unless it is held."""
    return _as_tensor(_announced.take())


def peek() -> Any:
    """The announced weight as a float32 tensor, or None; it stays announced."""
    return _as_tensor(_announced.value)


def _as_tensor(value: Any) -> Any:
    if value is None:
        return None
    announced_in_graph = tf.is_tensor(value) and tf.is_symbolic_tensor(value)
    if tf.executing_eagerly() or announced_in_graph or not _outside:
        return tf.cast(value, tf.float32)
    return _outside[0].read_value()
