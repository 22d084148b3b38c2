"""Embedding tables of users and items, most of the model, cut by rows at stage 3.

    horovodrun -np 2 python examples/recommender_keras.py

A table of 1 MiB or more stays cut up: a batch fetches the rows that it needs from the ranks that
own them, and sends their gradients back.
"""

from __future__ import annotations

import argparse

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import zerohvd.keras as zero

USERS, ITEMS, TASTES, SAMPLES = 10_000, 9000, 5, 60_000


def clicks() -> tf.data.Dataset:
    """Users click on items of their own taste."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, USERS, SAMPLES), rng.integers(0, ITEMS, SAMPLES)
    clicked = (users % TASTES == items % TASTES).astype("float32")
    data = tf.data.Dataset.from_tensor_slices(((users, items), clicked))
    return data.batch(2048, drop_remainder=True)


def make_model(dim: int) -> keras.Model:
    user, item = keras.Input((), dtype="int64"), keras.Input((), dtype="int64")
    both = [keras.layers.Embedding(USERS, dim)(user), keras.layers.Embedding(ITEMS, dim)(item)]
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()(both))
    return keras.Model([user, item], keras.layers.Dense(1, activation="sigmoid")(hidden))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(0)
    with zero.deferred_init():
        model = make_model(args.dim)
    model, optimizer = zero.zeroify(model, keras.optimizers.Adam(0.02), stage=3)
    model.compile(optimizer, loss="binary_crossentropy")
    history = model.fit(
        zero.shard_dataset(clicks()),
        epochs=args.epochs,
        verbose=0,
        callbacks=[zero.callbacks.MetricAverage()],
    )
    report, moved = zero.memory_report(model), zero.communication_report(model)
    if hvd.rank() == 0:
        losses = history.history["loss"]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\nthis rank holds\n{report}")
        print(f"and sends per step\n{moved}")


if __name__ == "__main__":
    main()
