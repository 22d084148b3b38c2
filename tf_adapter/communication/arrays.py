"""The tensor operations that the core's `HorovodCollectives` needs, for TensorFlow.

Works eagerly and, where the shapes are static, inside a tf.function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf


def dtype_name(x) -> str:
    return x.dtype.base_dtype.name


def numel(x) -> int:
    if x.shape.is_fully_defined():
        return math.prod(x.shape)
    raise ValueError(f"expected a tensor of static shape, got {x.shape} for {x!r}")


def itemsize(x) -> int:
    return x.dtype.base_dtype.size


def bits(x):
    """A 16-bit float as integers, bit by bit: Horovod moves those but not bfloat16."""
    return tf.bitcast(x, tf.int16)


def unbits(x):
    return tf.bitcast(x, tf.bfloat16)


def float32(x):
    return tf.cast(x, tf.float32)


def bfloat16(x):
    return tf.cast(x, tf.bfloat16)


def flatten(x):
    return tf.reshape(x, [-1])


def reshape_like(x, like):
    return tf.reshape(x, like.shape if like.shape.is_fully_defined() else tf.shape(like))


def sum_parts(x, n: int):
    """The sum of the `n` equal parts that `x` is a concatenation of, added in their order."""
    # Slices share memory where tf.split copies; add_n's order is not documented, a chain's is.
    length = x.shape[0] // n  # rows: x may have more dimensions
    total = x[:length]
    for part in range(1, n):
        total = total + x[part * length : (part + 1) * length]
    return total


def splits(seq: Sequence[int]):
    return tf.constant(list(seq), tf.int32)


def from_numpy(x: np.ndarray):
    return tf.convert_to_tensor(x)


def to_numpy(x) -> np.ndarray:
    return x.numpy() if tf.is_tensor(x) or isinstance(x, tf.Variable) else np.asarray(x)
