"""Keras' gradient clipping on pieces: norms are those of whole variables, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from zerohvd.config import ZeroConfig
from zerohvd.keras.communication.wire import Wire


def global_limit(inner: Any, config: ZeroConfig) -> float:
    """The limit of the norm over all variables; 0: none."""
    return float(inner.global_clipnorm or config.grad_clip or 0)


def needs_norms(inner: Any, config: ZeroConfig) -> bool:
    return bool(inner.clipnorm or global_limit(inner, config))


def by_value(grads: Sequence[Any], inner: Any) -> list[Any]:
    limit = inner.clipvalue
    if not limit or limit <= 0:
        return list(grads)
    return [g if g is None else tf.clip_by_value(g, -limit, limit) for g in grads]


def by_norm(
    grads: Sequence[Any],
    params: Sequence[int],
    count: int,
    inner: Any,
    config: ZeroConfig,
    wire: Wire | None,
) -> list[Any]:
    """Clip by the norm of each variable (`clipnorm`) or of all of them together.

    There is a gradient, or None, for each piece, which belongs to one of `count` variables
    (`params`). Without `wire`, every rank holds whole gradients.
    """
    squares = [tf.zeros([])] * count
    for grad, param in zip(grads, params, strict=True):
        if grad is not None:
            # Squares of norms add up; in float32 or better.
            wide = grad if grad.dtype == tf.float64 else tf.cast(grad, tf.float32)
            squares[param] = squares[param] + tf.cast(tf.reduce_sum(wide * wide), tf.float32)
    limit = global_limit(inner, config)
    agreed = tf.stack(squares) if inner.clipnorm else tf.reshape(tf.add_n(squares), [1])
    if wire is not None:
        agreed = wire.allreduce(agreed, f"{wire.prefix}/norms")
        wire.keep(agreed)
    norms = tf.sqrt(agreed)
    if inner.clipnorm:
        factors = inner.clipnorm / tf.maximum(norms, inner.clipnorm)
        return [_scale(g, factors[p]) for g, p in zip(grads, params, strict=True)]
    # A norm that is not finite makes every gradient NaN, as in Keras: nothing is hidden.
    factor = limit * tf.minimum(1.0 / norms[0], 1.0 / limit) + (norms[0] - norms[0])
    return [_scale(g, factor) for g in grads]


def _scale(grad: Any, factor: Any) -> Any:
    return None if grad is None else grad * tf.cast(factor, grad.dtype)
