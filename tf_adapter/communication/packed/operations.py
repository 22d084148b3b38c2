"""The tensor operations that the core's packing needs of TensorFlow: of static shapes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def rows(x: Any, width: int) -> Any:
    return tf.reshape(x, [x.shape[0] // width, width])


def flat(x: Any) -> Any:
    return tf.reshape(x, [x.shape.num_elements()])


def largest(rows: Any) -> Any:
    # As integers, floats without a sign keep their order, and NaN is the largest.
    sizes = tf.reduce_max(tf.bitcast(tf.abs(rows), tf.int32), axis=1)
    return tf.bitcast(sizes, tf.float32)


def inverse(scales: Any, least: float) -> Any:
    return tf.where(scales >= least, tf.math.reciprocal(scales), 0.0)


def encode(rows: Any, factors: Any, offset: float) -> Any:
    # By way of int32, which has a fast kernel; NaN may become anything.
    return tf.cast(tf.cast(rows * factors[:, None] + offset, tf.int32), tf.uint8)


def decode(codes: Any, factors: Any, offset: float) -> Any:
    return (tf.cast(codes, tf.float32) - offset) * factors[:, None]


def join_halves(codes: Any) -> Any:
    half = codes.shape[1] // 2
    return codes[:, :half] + codes[:, half:] * tf.constant(16, tf.uint8)


def split_halves(codes: Any) -> Any:
    low = tf.bitwise.bitwise_and(codes, tf.constant(15, tf.uint8))
    return tf.concat([low, tf.bitwise.right_shift(codes, tf.constant(4, tf.uint8))], 1)


def to_bytes(x: Any, dtype: str) -> Any:
    return flat(tf.bitcast(tf.cast(x, dtype), tf.uint8))


def from_bytes(data: Any, dtype: str) -> Any:
    wanted = tf.as_dtype(dtype)
    return tf.bitcast(rows(data, wanted.size), wanted)


def float32(x: Any) -> Any:
    return tf.cast(x, tf.float32)


def pad(x: Any, length: int) -> Any:
    return x if x.shape[0] == length else tf.pad(x, [[0, length - x.shape[0]]])


def concat(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def top(x: Any, count: int) -> Any:
    # As integers: NaN is the largest.
    sizes = tf.bitcast(tf.abs(x), tf.int32)
    return tf.math.top_k(sizes, count, sorted=False).indices


def take(x: Any, places: Any) -> Any:
    return tf.gather(x, places)


def put(values: Any, places: Any, length: int) -> Any:
    return tf.scatter_nd(places[:, None], values, [length])


def column(rows: Any, index: Any) -> Any:
    return tf.gather(rows, index, axis=1)


def with_column(values: Any, index: Any, width: int) -> Any:
    # Not by a product: NaN times 0 is NaN.
    here = tf.equal(tf.range(width), tf.cast(index, tf.int32))
    return flat(tf.where(here[None, :], values[:, None], 0.0))


def finite_or_zero(x: Any) -> Any:
    return tf.where(tf.math.is_finite(x), x, 0.0)


def where_zero(of: Any, x: Any) -> Any:
    return tf.where(tf.equal(of, 0.0), x, 0.0)
