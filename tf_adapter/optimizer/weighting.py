"""Ranks with unequal batches: how much each rank's gradient counts."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import tensorflow as tf


class _Announced:
    """The weight that has been announced for the step to come; None: ranks count alike."""

    value: Any = None
    outside: tf.Variable | None = None  # the last one that was announced outside of graphs
    held: bool = False  # not used up by the step that takes it
    in_loss: ClassVar[set[int]] = set()  # the optimizers whose loss was multiplied with it


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
        if not tf.is_tensor(value):
            value = float(value)
            if not math.isfinite(value) or value < 0:
                raise ValueError(
                    "a weight must be a number >= 0, such as the number of samples in this "
                    f"rank's batch; got {value!r}"
                )
        self.value = value
        self.__enter__()

    def __enter__(self) -> weight:
        _Announced.value = self.value
        if tf.executing_eagerly():
            # A step traced once, such as train_on_batch, must find the number of each later call.
            if _Announced.outside is None:
                _Announced.outside = tf.Variable(0.0, trainable=False, name="weight")
            _Announced.outside.assign(tf.cast(self.value, tf.float32))
        return self

    def __exit__(self, *_: object) -> None:
        _Announced.value = None


@contextlib.contextmanager
def held(value: Any) -> Iterator[None]:
    """The weight of all steps of all optimizers inside."""
    _Announced.value, _Announced.held = value, True
    try:
        yield
    finally:
        clear()


def holding(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method inside which an announced weight holds: TensorFlow may trace a step twice."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if _Announced.value is None:
            return original(*args, **kwargs)
        with held(_Announced.value):
            return original(*args, **kwargs)

    return method


def holds() -> bool:
    """Whether there is a weight that stays until its `held` ends."""
    return _Announced.held and _Announced.value is not None


def clear() -> None:
    """Forget an announced weight."""
    _Announced.value, _Announced.held, _Announced.in_loss = None, False, set()


def take() -> Any:
    """The announced weight as a float32 tensor, or None; it is used up unless it is held."""
    value = _Announced.value
    if not _Announced.held:
        _Announced.value = None
    if value is None:
        return None
    announced_in_graph = tf.is_tensor(value) and tf.is_symbolic_tensor(value)
    if tf.executing_eagerly() or announced_in_graph or _Announced.outside is None:
        return tf.cast(value, tf.float32)
    return _Announced.outside.read_value()


def put_into_loss(optimizer: Any) -> None:
    """Note that the optimizer's loss has been multiplied with the weight."""
    _Announced.in_loss.add(id(optimizer))


def is_in_loss(optimizer: Any) -> bool:
    """Whether the gradients to come contain the weight already."""
    found = id(optimizer) in _Announced.in_loss
    _Announced.in_loss.discard(id(optimizer))
    return found
