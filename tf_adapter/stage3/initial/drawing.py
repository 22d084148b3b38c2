"""First values of a variable range by range, the same as if all of it were initialised at once.

TensorFlow's stateless generators count: element i depends on the seed and on i alone. So every rank
draws its own part of a variable that has no memory yet (`zero.deferred_init`), and none of them the
whole. Initializers that need all of it (orthogonal ones, those of users) are not known here.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.layout import Span

# Elements that are drawn at once: a few temporaries of this size are all that drawing takes.
BLOCK = 1 << 20

_DRAWS = {
    "uniform": tf.raw_ops.StatelessRandomUniformV2,
    "normal": tf.raw_ops.StatelessRandomNormalV2,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
}
_WHOLE = {
    "uniform": tf.random.stateless_uniform,
    "normal": tf.random.stateless_normal,
    "truncated_normal": tf.random.stateless_truncated_normal,
}
# Elements that one count of the generator gives.
_PER_COUNT = {"float32": 4, "float64": 2}
# Rejected numbers are drawn again: as many counts are reserved for one element.
_RESERVED = 64


class Recipe(NamedTuple):
    """How to draw a variable: numbers alone, so that ranks can tell each other."""

    kind: str  # a key of _DRAWS, or "constant"
    dtype: str
    seed: tuple[int, int] = (0, 0)
    scale: float = 0.0
    shift: float = 0.0

    def draw(self, span: Span) -> Any:
        """The elements in the range of the flattened variable, 1-D."""
        if self.kind == "constant":
            return tf.fill([span.length], tf.constant(self.shift, self.dtype))
        numbers = _draw(self.kind, self.dtype, self.seed, span)
        return numbers * tf.constant(self.scale, self.dtype) + tf.constant(self.shift, self.dtype)


def recipe_of(variable: Any) -> Recipe | None:
    """The recipe for a variable that has no memory yet; None: all of it must be made at once."""
    if compat.native_variable(variable) is not None:
        return None
    dtype = compat.stored_dtype(variable)
    found = compat.distribution_of(variable)
    if found is None or (found.kind != "constant" and not _is_countable(found.kind, dtype)):
        return None
    first, second = found.first, found.second
    if found.kind == "uniform":
        # Keras casts the bounds, which TensorFlow takes for float32 before.
        first, second = (np.dtype(dtype).type(np.float32(x)) for x in (first, second))
        return Recipe("uniform", dtype, found.seed, float(second - first), float(first))
    return Recipe(found.kind, dtype, found.seed, float(second), float(first))


def _draw(kind: str, dtype: str, seed: tuple[int, int], span: Span) -> Any:
    per_count = _PER_COUNT[dtype]
    group, skip = span.start // per_count, 1
    if kind == "truncated_normal":
        skip = _RESERVED * per_count
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.constant(seed, tf.int32))
    counter = counter + tf.constant([group * skip, 0], tf.uint64)
    start = group * per_count
    drawn = _DRAWS[kind](
        shape=[span.stop - start],
        key=key,
        counter=counter,
        alg=tf.raw_ops.StatelessRandomGetAlg(),
        dtype=tf.as_dtype(dtype),
    )
    return drawn[span.start - start :]


@functools.cache
def _is_countable(kind: str, dtype: str) -> bool:
    """Whether a range drawn by itself is what it is in the whole: how TensorFlow counts is not
    documented."""
    if dtype not in _PER_COUNT:
        return False
    with tf.init_scope():
        seed = (3, 5)
        whole = _WHOLE[kind]([4096], seed=seed, dtype=tf.as_dtype(dtype))
        parts = [Span(0, 7), Span(7, 2050), Span(2050, 4096)]
        drawn = tf.concat([_draw(kind, dtype, seed, part) for part in parts], 0)
        return bool(tf.reduce_all(drawn == whole))
