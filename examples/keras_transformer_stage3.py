"""A Keras transformer whose variables are sharded too, in model.fit.

    horovodrun -np 2 python examples/keras_transformer_stage3.py

Under zero.deferred_init large variables take no memory. zeroify gives each rank its share. The
blocks repeat, so each of them is a unit: gathered when it is called, and freed after.
"""

from __future__ import annotations

import argparse

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import zerohvd.keras as zero

VOCAB, LENGTH, SAMPLES = 128, 32, 512


class Block(keras.layers.Layer):
    def __init__(self, dim: int, **options) -> None:
        super().__init__(**options)
        self.attend = keras.layers.MultiHeadAttention(4, dim // 4)
        self.norm1 = keras.layers.LayerNormalization()
        self.norm2 = keras.layers.LayerNormalization()
        self.up = keras.layers.Dense(4 * dim, activation="gelu")
        self.down = keras.layers.Dense(dim)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        normed = self.norm1(x)
        x = x + self.attend(normed, normed, use_causal_mask=True)
        return x + self.down(self.up(self.norm2(x)))


def make_model(dim: int, layers: int) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCAB, dim)(tokens)
    for _ in range(layers):
        x = Block(dim)(x)
    return keras.Model(tokens, keras.layers.Dense(VOCAB)(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(0)  # the same on all ranks
    with zero.deferred_init():
        model = make_model(args.dim, args.layers)
    model, optimizer = zero.zeroify(model, keras.optimizers.AdamW(1e-3), stage=3)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    starts = np.random.default_rng(0).integers(0, VOCAB, size=(SAMPLES, 1))
    text = (starts + np.arange(LENGTH + 1)) % VOCAB  # each token is followed by the next
    data = tf.data.Dataset.from_tensor_slices((text[:, :-1], text[:, 1:])).batch(32)
    averages = [zero.callbacks.MetricAverage()]
    history = model.fit(
        zero.shard_dataset(data), epochs=args.epochs, callbacks=averages, verbose=0
    )
    report = zero.memory_report(model)
    if hvd.rank() == 0:
        losses = history.history["loss"]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\nthis rank holds\n{report}")


if __name__ == "__main__":
    main()
