"""A training loop of your own in Keras 3, with sharded optimizer state.

    horovodrun -np 2 python examples/keras_custom_loop.py

zero.weight tells how many samples this rank has: the last batch does not divide evenly, and a rank
may have none of it.
"""

from __future__ import annotations

import argparse

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import zerohvd.keras as zero

SAMPLES, BATCH = 1021, 64


def make_dataset() -> tf.data.Dataset:
    """The same on all ranks, in batches as one process would see them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 16)).astype("float32")
    y = x @ rng.normal(size=(16, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=1).batch(BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((16,)), dense(64, activation="gelu"), dense(1)])
    inner = keras.optimizers.AdamW(1e-2, global_clipnorm=10.0)
    optimizer = zero.DistributedOptimizer(inner, stage=args.stage)
    optimizer.build(model.trainable_variables)  # and all ranks have rank 0's weights

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        zero.weight(tf.shape(x)[0])
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((model(x, training=True) - y) ** 2)
            loss = tf.math.divide_no_nan(errors, tf.cast(tf.shape(x)[0], tf.float32))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return errors

    for epoch in range(args.epochs):
        errors = tf.add_n([train_step(x, y) for x, y in zero.shard_dataset(make_dataset())])
        loss = hvd.allreduce(errors, op=hvd.Sum, name="errors") / SAMPLES
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {float(loss):.3f}", flush=True)


if __name__ == "__main__":
    main()
