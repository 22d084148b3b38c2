"""Train a classifier of about a million parameters with Keras 3, sharded over the ranks.

    horovodrun -np 2 python examples/keras_fit.py --stage 2

One line differs from a script for one process: zero.DistributedOptimizer around the optimizer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import zerohvd.keras as zero

CLASSES, FEATURES, SAMPLES = 10, 64, 6000


def make_dataset() -> tf.data.Dataset:
    """Noisy points around a few centres per class, in batches as one process would see them."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4 * CLASSES, FEATURES)).astype("float32")
    chosen = rng.integers(0, len(centres), size=SAMPLES)
    samples = centres[chosen] + rng.normal(size=(SAMPLES, FEATURES)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((samples, chosen % CLASSES))
    return data.shuffle(SAMPLES, seed=1).batch(128)


def make_model() -> keras.Model:
    dense = keras.layers.Dense
    return keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            *(dense(640, activation="relu") for _ in range(3)),
            dense(320, activation="relu"),
            dense(CLASSES, activation="softmax"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--summary", type=Path, help="write the results here as JSON")
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(0)
    data = zero.shard_dataset(make_dataset())  # each rank its part of every batch
    model = make_model()
    optimizer = zero.DistributedOptimizer(keras.optimizers.AdamW(1e-3), stage=args.stage)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    untrained = tf.constant(model.evaluate(data, verbose=0)[0])
    before = float(hvd.allreduce(untrained, name="untrained"))
    history = model.fit(
        data,
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[zero.callbacks.MetricAverage()],
    )

    report = zero.memory_report(model)
    if hvd.rank() == 0:
        losses = [before, *history.history["loss"]]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\nthis rank holds\n{report}")
        print(f"and sends per step\n{zero.communication_report(model)}")
        if args.summary:
            held = {key: report[key] for key in ("params", "grads", "optimizer")}
            count = model.count_params()
            summary = {"params": count, "before": losses[0], "after": losses[-1], "held": held}
            args.summary.write_text(json.dumps(summary))


if __name__ == "__main__":
    main()
