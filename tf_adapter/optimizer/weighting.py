"""Ranks with unequal batches: how much each rank's gradient counts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from zerohvd.communication.weighting import Announced, check_weight


class _KerasAnnounced(Announced):
    """The announced weight, which may be a tensor of a graph.

    Attributes:
        outside: The last weight that was announced outside of graphs.
        in_loss: The optimizers whose loss was multiplied with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outside: tf.Variable | None = None
        self.in_loss: set[int] = set()

    def clear(self) -> None:
        super().clear()
        self.in_loss.clear()


_announced = _KerasAnnounced()


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
            if _announced.outside is None:
                _announced.outside = tf.Variable(0.0, trainable=False, name="weight")
            _announced.outside.assign(tf.cast(self.value, tf.float32))
        return self

    def __exit__(self, *_: object) -> None:
        _announced.value = None


@contextlib.contextmanager
def held(value: Any) -> Iterator[None]:
    """The weight of all steps of all optimizers inside."""
    _announced.announce(value, held=True)
    try:
        yield
    finally:
        clear()


def holding(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method inside which an announced weight holds: TensorFlow may trace a step twice."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if _announced.value is None:
            return original(*args, **kwargs)
        with held(_announced.value):
            return original(*args, **kwargs)

    return method


def holds() -> bool:
    """Whether there is a weight that stays until its `held` ends."""
    return _announced.held and _announced.value is not None


def clear() -> None:
    """Forget an announced weight."""
    _announced.clear()


def take() -> Any:
    """The announced weight as a float32 tensor, or None; it is used up unless it is held."""
    value = _announced.take()
    if value is None:
        return None
    announced_in_graph = tf.is_tensor(value) and tf.is_symbolic_tensor(value)
    if tf.executing_eagerly() or announced_in_graph or _announced.outside is None:
        return tf.cast(value, tf.float32)
    return _announced.outside.read_value()


def put_into_loss(optimizer: Any) -> None:
    """Note that the optimizer's loss has been multiplied with the weight."""
    _announced.in_loss.add(id(optimizer))


def is_in_loss(optimizer: Any) -> bool:
    """Whether the gradients to come contain the weight already."""
    found = id(optimizer) in _announced.in_loss
    _announced.in_loss.discard(id(optimizer))
    return found
