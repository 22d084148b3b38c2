"""One tf.data.Dataset for all ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from zerohvd.collectives import HorovodCollectives


def shard_dataset(
    dataset: tf.data.Dataset,
    batch_size: int | None = None,
    *,
    check: bool = True,
    process_set: Any = None,
) -> tf.data.Dataset:
    """This rank's part of every batch, so that all ranks together train as one process would.

    Each batch of `dataset` is cut into one part per rank. All ranks get the same number of steps.
    The last, smaller batch is cut as evenly as it can be, and sample weights make up for parts of
    different sizes: the mean over the ranks of the weighted losses is the mean over the samples.
    A rank that gets no sample at all runs one with weight 0. (That is for losses that average
    over samples, Keras' default.) Batches known to divide evenly get no weights.

    Gradients are exact. So are metrics under MetricAverage while batches divide evenly; in a last
    batch that does not, the loss and weighted metrics count a rank's samples by their weights, so
    that the mean over an epoch is off by as much as a sample or two of it.

    Args:
        dataset: Of (x, y) or (x, y, sample_weight), in batches as one process would train on
            them; every rank must see the same order, so `shuffle` needs a seed.
        batch_size: If the dataset is not batched: samples per rank and step.
        check: Compare the first batch of all ranks, and raise if they differ.
        process_set: The ranks that share; all of them unless given.
    """
    ranks = HorovodCollectives(hvd, process_set)
    if batch_size is not None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        dataset = dataset.batch(batch_size * ranks.size)
    _check_spec(dataset.element_spec)
    if ranks.size == 1:
        return dataset
    if check:
        _check_order(dataset, ranks)
    static = tf.nest.flatten(dataset.element_spec)[0].shape[0]
    even = static is not None and static % ranks.size == 0

    def part(*batch: Any) -> Any:
        total = tf.shape(tf.nest.flatten(batch[0])[0])[0]
        start = total * ranks.rank // ranks.size
        stop = total * (ranks.rank + 1) // ranks.size
        own = stop - start
        # A model cannot average over nothing: an empty part borrows a sample at weight 0.
        start = tf.where(own > 0, start, 0)
        stop = tf.where(own > 0, stop, 1)
        cut = tf.nest.map_structure(lambda t: t[start:stop], batch)
        if even:
            return cut
        share = tf.cast(own * ranks.size, tf.float32) / tf.cast(total, tf.float32)
        weights = tf.fill([stop - start], share)
        if len(cut) == 3:
            weights = _times(cut[2], weights)
        return (*cut[:2], weights)

    return dataset.map(part, num_parallel_calls=tf.data.AUTOTUNE).prefetch(1)


def _times(given: Any, weights: Any) -> Any:
    def times(g: Any) -> Any:
        shape = tf.concat([tf.shape(weights), tf.ones([tf.rank(g) - 1], tf.int32)], 0)
        return g * tf.cast(tf.reshape(weights, shape), g.dtype)

    return tf.nest.map_structure(times, given)


def _check_spec(spec: Any) -> None:
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise ValueError(
            "shard_dataset needs a dataset of (x, y) or (x, y, sample_weight) tuples, because "
            f"uneven batches are evened out by sample weights; got elements {spec}"
        )
    for part in tf.nest.flatten(spec):
        if part.shape.rank == 0:
            raise ValueError(
                "shard_dataset needs a batched dataset, or batch_size=...; an element has the "
                f"scalar {part}"
            )


def _check_order(dataset: tf.data.Dataset, ranks: HorovodCollectives) -> None:
    digest = hashlib.sha256()
    for batch in dataset.take(1):
        for x in tf.nest.flatten(batch):
            digest.update(np.ascontiguousarray(x.numpy()).tobytes())
    seen = ranks.allgather_object(digest.hexdigest(), name="zero/dataset")
    differ = [r for r, d in enumerate(seen) if d != seen[0]]
    if differ:
        raise ValueError(
            f"the first batch of ranks {differ} is not that of rank 0: ranks would train on some "
            "samples twice and on others never. Give the dataset the same order on all ranks, "
            "such as shuffle(..., seed=1) under the same tf.random.set_seed; or pass check=False "
            "if that is meant."
        )
