"""Ranks with unequal batches: how much each rank's gradient counts."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf


class _Announced:
    """The weight that has been announced for the step to come; None: ranks count alike."""

    value: Any = None


class weight:
    """Say how much this rank counts in the next step.

    Gradients are averages over the rank's own batch; with the number of its samples as the
    weight, the result equals one process on the union of all samples. Every rank has to give a
    weight, 0 where it has no samples; a tensor will do, such as `tf.shape(x)[0]`.

        zero.weight(n); opt.apply_gradients(...)              # until the next apply
        with zero.weight(n): opt.apply_gradients(...)         # the same
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
        _Announced.value = value

    def __enter__(self) -> weight:
        _Announced.value = self.value
        return self

    def __exit__(self, *_: object) -> None:
        _Announced.value = None


def clear() -> None:
    """Forget an announced weight."""
    _Announced.value = None


def take() -> Any:
    """The announced weight as a float32 tensor, or None; it is used up."""
    value, _Announced.value = _Announced.value, None
    return None if value is None else tf.cast(value, tf.float32)
