"""Gradients as they come: tensors, rows of tables, or None; and waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras.gradients import sparse


def dense(grad: Any) -> Any:
    return grad.dense() if isinstance(grad, sparse.Rows) else grad


def on_values(grad: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(grad, sparse.Rows):
        return grad.map(function)
    return None if grad is None else function(grad)


def cast(grad: Any, dtype: Any) -> Any:
    return on_values(grad, lambda g: tf.cast(g, dtype))


def as_it_is(grad: Any) -> Any:
    return grad


def times(grad: Any, factor: Any) -> Any:
    return None if grad is None else grad * tf.cast(factor, grad.dtype)


def divided(grad: Any, scale: Any) -> Any:
    return None if grad is None else grad / tf.cast(scale, grad.dtype)


def added(grad: Any, total: Any, steps: int) -> Any:
    return None if grad is None else (tf.cast(grad, total.dtype) + total) / steps


def first_of(grads: Sequence[Any]) -> list[Any]:
    """Something to depend on so as to depend on the data of this step: what backward gives
    first, which is the gradient of the last variable."""
    for grad in reversed(grads):
        if grad is not None:
            return [grad.values if isinstance(grad, sparse.Rows) else grad]
    return []


def to_wait_for(done: Any) -> list[Any]:
    """What `tf.control_dependencies` takes, out of nested lists; eager assigns return None."""
    if isinstance(done, (list, tuple)):
        return [t for d in done for t in to_wait_for(d)]
    return [] if done is None or tf.executing_eagerly() else [done]
