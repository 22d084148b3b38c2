"""One tf.data.Dataset for all ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from zerohvd.communication.agreement import check_same_data
from zerohvd.communication.collectives import HorovodCollectives
from zerohvd.keras.communication import arrays
from zerohvd.keras.fit import batches, order, uneven


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
    loss function of your own that returns one number is taken for a mean over samples.

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

    `evaluate` outside of `fit` gives the metrics of this rank's part, 0 without samples; those of
    the whole with `evaluate(data, callbacks=[zero.callbacks.MetricAverage()])` on all ranks.
    `predict` gives the predictions of this rank's part.

    Args:
        dataset: Of x, (x, y) or (x, y, sample_weight), in batches as one process would train on
            them; x and y may be nested, ragged, sparse or strings. Every rank must see the same
            order in every epoch, so `shuffle` needs a seed, of its own or by tf.random.set_seed.
        batch_size: If the dataset is not batched: samples per rank and step.
        check: Compare the first batch of all ranks, which is read once for that; and in `fit`,
            after every epoch, which batches they have read. Raise if they differ.
        process_set: The ranks that share; all of them unless given.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"shard_dataset needs a tf.data.Dataset, got {type(dataset).__name__}; arrays become "
            "one by tf.data.Dataset.from_tensor_slices((x, y)).batch(128)"
        )
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
        total = batches.rows(tf.nest.flatten(batch)[0])
        start = total * ranks.rank // ranks.size
        stop = total * (ranks.rank + 1) // ranks.size
        mine = tf.nest.map_structure(lambda t: batches.cut(t, start, stop), batch)
        return mine if isinstance(dataset.element_spec, tuple) else mine[0]

    watched = order.Watch().on(dataset) if check else dataset
    parts = watched.map(part, num_parallel_calls=tf.data.AUTOTUNE).prefetch(1)
    return uneven.mark(parts, uneven.Parts(samples / ranks.size, even, process_set))


def _check_spec(spec: Any) -> None:
    if isinstance(spec, tuple) and len(spec) > 3:
        raise ValueError(
            "shard_dataset needs a dataset of x, (x, y) or (x, y, sample_weight), as fit does; "
            f"several inputs are ((a, b), y) or ({{'a': a, 'b': b}}, y). Got elements {spec}"
        )
    parts = tf.nest.flatten(spec)
    for part in parts:
        if part.shape.rank == 0:
            raise ValueError(
                "shard_dataset needs a batched dataset, or batch_size=...; an element has the "
                f"scalar {part}"
            )
    known = {p.shape[0] for p in parts if p.shape.rank} - {None}
    if len(known) > 1:
        raise ValueError(
            "shard_dataset needs a batched dataset, or batch_size=...; the first dimensions of an "
            f"element differ, so they are no batch: {spec}"
        )


def _check_order(dataset: tf.data.Dataset, ranks: HorovodCollectives) -> int:
    """Raise if ranks see another first batch; how many samples it has, at least 1."""
    first = next(iter(dataset.take(1)), ())
    counts = {int(batches.rows(t)) for t in tf.nest.flatten(first)}
    check_same_data(ranks, batches.digest(first), hint=order.HINT)
    if len(counts) > 1:
        raise ValueError(
            "shard_dataset needs a batched dataset, or batch_size=...; the tensors of its first "
            f"element have {sorted(counts)} rows"
        )
    return max(1, *counts, 1)
