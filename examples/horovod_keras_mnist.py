"""A Keras script for Horovod, with one line changed: the import.

    horovodrun -np 2 python examples/horovod_keras_mnist.py

It was `import horovod.tensorflow.keras as hvd`; examples/diffs/horovod_keras_mnist.diff has the
whole difference. Everything else is as Horovod's guide has it: the learning rate scaled by the
number of ranks and warmed up, weights broadcast from rank 0, metrics averaged, checkpoints and
output on rank 0 only, and each rank its share of the steps.

The import is the line to change because on Keras 3 no part of horovod.tensorflow.keras that
matters works: its DistributedOptimizer trains every rank for itself, without a word, and its
callbacks fail.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf

import zerohvd.keras as hvd

BATCH, SAMPLES = 64, 2048


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Noisy pictures of ten shapes, in the place of MNIST."""
    rng = np.random.default_rng(0)
    shapes = rng.random((10, 28, 28, 1)).astype("float32").round()
    labels = rng.integers(0, 10, size=SAMPLES)
    return shapes[labels] + rng.normal(scale=0.5, size=(SAMPLES, 28, 28, 1)), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="checkpoint-{epoch}.keras")
    args = parser.parse_args()

    hvd.init()

    dataset = tf.data.Dataset.from_tensor_slices(digits())
    dataset = dataset.repeat().shuffle(SAMPLES).batch(BATCH)

    model = keras.Sequential(
        [
            keras.layers.Conv2D(8, [3, 3], activation="relu"),
            keras.layers.MaxPooling2D(pool_size=(2, 2)),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )

    scaled_lr = 0.001 * hvd.size()
    opt = keras.optimizers.Adam(scaled_lr)
    opt = hvd.DistributedOptimizer(opt)
    model.compile(opt, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=1, verbose=1),
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint))

    model.fit(
        dataset,
        steps_per_epoch=SAMPLES // BATCH // hvd.size(),
        callbacks=callbacks,
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
    )


if __name__ == "__main__":
    main()
