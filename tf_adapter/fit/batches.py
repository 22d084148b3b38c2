"""What a batch is made of: tensors, ragged and sparse ones, in any nest of tuples and dicts."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

# Elements per tensor that a digest looks at, spread over the batch.
_SAMPLED = 128
_BUCKETS = 1 << 62


def rows(t: Any) -> Any:
    """How many samples there are in a tensor of a batch, as a tensor."""
    return tf.cast(tf.shape(t)[0], tf.int32)


def cut(t: Any, start: Any, stop: Any) -> Any:
    """Samples `start` to `stop`."""
    if not isinstance(t, tf.SparseTensor):
        return t[start:stop]
    begin = tf.cast(tf.concat([[start], tf.zeros_like(tf.shape(t)[1:])], 0), tf.int64)
    size = tf.concat([[tf.cast(stop - start, tf.int64)], t.dense_shape[1:]], 0)
    part = tf.sparse.slice(t, begin, size)
    if t.shape.rank is None:
        return part
    # tf.sparse.slice forgets what is known of the shape, by which layers make their kernels.
    known = [size[i] if d is None or i == 0 else d for i, d in enumerate(t.shape)]
    return tf.SparseTensor(part.indices, part.values, [tf.cast(d, tf.int64) for d in known])


def one_row(t: Any) -> Any:
    """A row of zeros, or an empty one, like those of a tensor that has none."""
    if isinstance(t, tf.RaggedTensor):
        return tf.RaggedTensor.from_row_splits(t.values, tf.zeros([2], t.row_splits.dtype))
    if isinstance(t, tf.SparseTensor):
        shape = tf.concat([tf.ones([1], tf.int64), t.dense_shape[1:]], 0)
        return tf.SparseTensor(t.indices, t.values, shape)
    return tf.zeros(tf.concat([[1], tf.shape(t)[1:]], 0), t.dtype)


def digest(batch: Any) -> str:
    """Of everything in the batch, and of how many rows each of its tensors has; eager only."""
    found = hashlib.sha256()
    for t in tf.nest.flatten(batch, expand_composites=True):
        value = np.asarray(t)
        found.update(f"{value.dtype} {value.shape}".encode())
        # An array of strings holds addresses, which differ between processes.
        is_text = value.dtype == object
        found.update(repr(value.tolist()).encode() if is_text else value.tobytes())
    return found.hexdigest()


def sampled_digest(batch: Any, before: Any) -> Any:
    """Of some elements of every tensor and of the digest before it: an int64, cheap in a graph."""
    found = [tf.strings.as_string(before)]
    for t in tf.nest.flatten(batch, expand_composites=True):
        flat = tf.reshape(t, [-1])
        sample = flat[:: tf.maximum(1, tf.size(flat) // _SAMPLED)]
        found += [tf.strings.as_string(tf.size(flat)), tf.io.serialize_tensor(sample)]
    return tf.strings.to_hash_bucket_fast(tf.strings.join(found), _BUCKETS)
