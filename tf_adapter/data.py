"""One tf.data.Dataset for all ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from zerohvd.communication.agreement import check_same_data
from zerohvd.communication.collectives import HorovodCollectives
from zerohvd.keras.communication import arrays
from zerohvd.keras.fit import uneven


def shard_dataset(
    dataset: tf.data.Dataset,
    batch_size: int | None = None,
    *,
    check: bool = True,
    process_set: Any = None,
) -> tf.data.Dataset:
    """This rank's part of every batch, so that all ranks together train as one process would.

    Each batch of `dataset` is cut into one part per rank. All ranks get the same number of steps.
    The last, smaller batch is cut as evenly as it can be, and a rank may get no sample of it.
    Samples stay as they are, `sample_weight` included.

    `fit` counts every rank by the samples it has: gradients are those of the whole batch, and
    under MetricAverage so are the metrics. That holds for the reductions "sum" and
    "mean_with_sample_weight" and for masks too, in which ranks count by what the loss divides by; a
    loss function of your own that returns one number is taken for a mean over samples. The losses
    of several outputs are means over samples; Keras takes them over batches.

    A loop of your own must say before every `apply` how many samples there are, 0 included:

        for x, y in zero.shard_dataset(data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            zero.weight(tf.shape(x)[0])
            opt.apply(tape.gradient(loss, model.trainable_variables))

    Without it ranks count alike, and nothing warns: in the last batch a sample of a small part
    counts for more than others, and a rank with no sample, whose mean is NaN, makes all weights
    NaN. The same holds for `train_on_batch`. Or leave it out: `data.batch(..., drop_remainder=
    True)` of a size that the ranks divide.

    `evaluate` and `predict` outside of `fit` give what this rank's part does; a rank without
    samples has 0 for every metric and an empty prediction.

    Args:
        dataset: Of (x, y) or (x, y, sample_weight), in batches as one process would train on
            them; every rank must see the same order, so `shuffle` needs a seed.
        batch_size: If the dataset is not batched: samples per rank and step.
        check: Compare the first batch of all ranks, and raise if they differ.
        process_set: The ranks that share; all of them unless given.
    """
    ranks = HorovodCollectives(hvd, arrays, process_set)
    if batch_size is not None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        dataset = dataset.batch(batch_size * ranks.size)
    _check_spec(dataset.element_spec)
    if ranks.size == 1:
        return dataset
    samples = _check_order(dataset, ranks) if check else ranks.size
    static = tf.nest.flatten(dataset.element_spec)[0].shape[0]
    even = static is not None and static % ranks.size == 0

    def part(*batch: Any) -> Any:
        total = tf.shape(tf.nest.flatten(batch[0])[0])[0]
        start = total * ranks.rank // ranks.size
        stop = total * (ranks.rank + 1) // ranks.size
        return tf.nest.map_structure(lambda t: t[start:stop], batch)

    parts = dataset.map(part, num_parallel_calls=tf.data.AUTOTUNE).prefetch(1)
    return uneven.mark(parts, uneven.Parts(samples / ranks.size, even, process_set))


def _check_spec(spec: Any) -> None:
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise ValueError(
            "shard_dataset needs a dataset of (x, y) or (x, y, sample_weight) tuples, as fit does; "
            f"got elements {spec}"
        )
    for part in tf.nest.flatten(spec):
        if part.shape.rank == 0:
            raise ValueError(
                "shard_dataset needs a batched dataset, or batch_size=...; an element has the "
                f"scalar {part}"
            )


def _check_order(dataset: tf.data.Dataset, ranks: HorovodCollectives) -> int:
    """Raise if ranks see another first batch; how many samples it has, at least 1."""
    digest = hashlib.sha256()
    samples = 1
    for batch in dataset.take(1):
        for x in tf.nest.flatten(batch):
            digest.update(np.ascontiguousarray(x.numpy()).tobytes())
        samples = max(1, len(tf.nest.flatten(batch)[0]))
    hint = "shuffle(..., seed=1) under the same tf.random.set_seed"
    check_same_data(ranks, digest.hexdigest(), hint=hint)
    return samples
