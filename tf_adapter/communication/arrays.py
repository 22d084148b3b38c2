"""The tensor operations that the core's `HorovodCollectives` needs, for TensorFlow.

Works eagerly and, where the shapes are static, inside a tf.function.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from zerohvd.keras.communication.recurring import kept_in_graph

# dtypes that are summed in float32: 16 bits would round after every rank.
NARROW = (tf.float16, tf.bfloat16)


def dtype_name(x: Any) -> str:
    return str(x.dtype.base_dtype.name)


def numel(x: Any) -> int:
    if x.shape.is_fully_defined():
        return math.prod(x.shape)
    raise ValueError(f"expected a tensor of static shape, got {x.shape} for {x!r}")


def itemsize(x: Any) -> int:
    return int(x.dtype.base_dtype.size)


def nbytes(x: Any) -> int:
    """Bytes of a tensor, a tf.Variable or a keras.Variable."""
    return math.prod(x.shape) * int(tf.as_dtype(x.dtype).size)


def bits(x: Any) -> Any:
    """A bfloat16 tensor as integers, bit by bit: Horovod moves these but not bfloat16.

    int16; or two bytes in one more dimension where NCCL may carry it, which knows no 16-bit
    integers.
    """
    return tf.bitcast(x, tf.uint8 if hvd.nccl_built() else tf.int16)


def unbits(x: Any) -> Any:
    """The reverse."""
    return tf.bitcast(x, tf.bfloat16)


def float32(x: Any) -> Any:
    return tf.cast(x, tf.float32)


def bfloat16(x: Any) -> Any:
    return tf.cast(x, tf.bfloat16)


def widen(x: Any) -> Any:
    """16-bit floats as float32; anything else as it is."""
    return float32(x) if x.dtype in NARROW else x


def numbers(values: Sequence[int]) -> Any:
    """A constant vector, one per graph: the operations of a large model are cut by the same numbers
    again and again, and each takes memory."""
    if tf.executing_eagerly():
        return tf.constant(values, tf.int32)
    known, key = kept_in_graph("numbers"), tuple(values)
    if key not in known:
        with tf.control_dependencies(None):
            known[key] = tf.constant(key, tf.int32, shape=[len(key)])
    return known[key]


def cut(x: Any, start: int, stop: int) -> Any:
    """A slice of a 1-D tensor of known length; no operation if that is all of it."""
    if (start, stop) == (0, x.shape[0]):
        return x
    if start == stop:
        start = stop = 0  # it may lie behind the end
    out = tf.slice(x, numbers([start]), numbers([stop - start]))
    out.set_shape([stop - start])
    return out


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """`x` in a known shape; no operation if it has that."""
    shape = tuple(shape)
    if x.shape.is_fully_defined() and tuple(x.shape) == shape:
        return tf.convert_to_tensor(x)
    out = tf.reshape(x, numbers(shape))
    out.set_shape(shape)
    return out


def flatten(x: Any) -> Any:
    return reshape(x, [numel(x)]) if x.shape.is_fully_defined() else tf.reshape(x, [-1])


def reshape_like(x: Any, like: Any) -> Any:
    return tf.reshape(x, like.shape if like.shape.is_fully_defined() else tf.shape(like))


def sum_parts(x: Any, n: int) -> Any:
    """The sum of the `n` equal parts that `x` is a concatenation of, added in their order."""
    # Slices share memory where tf.split copies; add_n's order is not documented, a chain's is.
    length = x.shape[0] // n  # rows: x may have more dimensions
    parts = [
        cut(x, i * length, (i + 1) * length)
        if len(x.shape) == 1
        else x[i * length : (i + 1) * length]
        for i in range(n)
    ]
    return functools.reduce(operator.add, parts)


def splits(seq: Sequence[int]) -> Any:
    return numbers(list(seq))


def from_numpy(x: np.ndarray[Any, Any]) -> Any:
    return tf.convert_to_tensor(x)


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    found = x.numpy() if tf.is_tensor(x) or isinstance(x, tf.Variable) else x
    return np.asarray(found)
