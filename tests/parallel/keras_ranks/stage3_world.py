"""What the tests of stage 3 share: models, data, and plain Keras on the union of all batches."""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import keras_world as world
import numpy as np
import tensorflow as tf

import zerohvd.keras as zero

VOCABULARY, LENGTH, WIDTH = 37, 6, 16
SIZE, RANK = world.SIZE, world.RANK
PER_RANK, STEPS = 4, 20


@keras.saving.register_keras_serializable(package="stage3")
class Block(keras.layers.Layer):
    """A transformer's block; nothing in it takes `training`: it travels by Keras' call context."""

    def __init__(self, width=WIDTH, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.width, self.dropout = width, dropout
        self.norm = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(2, width // 2, dropout=dropout)
        self.norm2 = keras.layers.LayerNormalization()
        self.up = keras.layers.Dense(2 * width, activation="gelu")
        self.down = keras.layers.Dense(width)
        self.drop = keras.layers.Dropout(dropout)

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.norm2.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 2 * self.width))

    def call(self, x):
        normed = self.norm(x)
        x = x + self.attention(normed, normed)
        return x + self.drop(self.down(self.up(self.norm2(x))))

    def get_config(self):
        return {**super().get_config(), "width": self.width, "dropout": self.dropout}


def transformer(blocks=2, dropout=0.0, seed=7):
    keras.utils.set_random_seed(seed)
    tokens = keras.Input((LENGTH,), dtype="int32")
    # Without Embedding: plain Keras squares its sparse gradients row by row.
    x = keras.layers.Lambda(lambda t: tf.one_hot(t, VOCABULARY), (LENGTH, VOCABULARY))(tokens)
    x = keras.layers.Dense(WIDTH, name="embed")(x)
    for _ in range(blocks):
        x = Block(dropout=dropout)(x)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))


_rng = np.random.default_rng(1)
TOKENS = _rng.integers(0, VOCABULARY, (STEPS * PER_RANK * SIZE, LENGTH)).astype("int32")
NEXT = np.roll(TOKENS, -1, 1)
X = _rng.normal(size=(STEPS * PER_RANK * SIZE, 7)).astype("float32")
Y = _rng.normal(size=(STEPS * PER_RANK * SIZE, 1)).astype("float32")


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adamw():
    # The gradient of a key's bias is zero but for rounding, which a small epsilon would amplify.
    return keras.optimizers.AdamW(1e-2, epsilon=1e-4)


class Losses(keras.callbacks.Callback):
    """What `fit` says of the loss after every batch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(float(logs["loss"]))


def data(x, y, batch=PER_RANK * SIZE):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True)


def fit(model, optimizer, x, y, loss, *, alone, **compile_options):
    """Train for one epoch; returns the mean loss after each batch, over all ranks' samples."""
    model.compile(optimizer=optimizer, loss=loss, **compile_options)
    seen = Losses()
    batches = data(x, y) if alone else zero.shard_dataset(data(x, y))
    model.fit(batches, verbose=0, callbacks=[seen])
    found = np.array(seen.found)
    if alone or SIZE == 1:
        return found
    return hvd.allreduce(tf.constant(found), op=hvd.Average, name="losses").numpy()


def compare(make, x, y, loss, optimizer=adamw, tolerance=1e-6, weights=1e-5, **options):
    """Plain Keras on the union batch and stage 3 give the same losses and weights."""
    zero_options = {k: options.pop(k) for k in list(options) if k in ZERO_OPTIONS}
    plain = make()
    expected = fit(plain, optimizer(), x, y, loss(), alone=True, **options)
    model, opt = zero.zeroify(make(), optimizer(), stage=3, **zero_options)
    got = fit(model, opt, x, y, loss(), alone=False, **options)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    assert_same_weights(model, plain, weights)
    return model


ZERO_OPTIONS = ("units", "persist_below", "recompute", "partition", "bucket_bytes", "grad_clip")


def assert_same_weights(model, plain, tolerance=1e-5):
    with zero.gathered(model):
        got = [v.numpy() for v in model.weights]
    for g, variable in zip(got, plain.weights, strict=True):
        e = variable.numpy()
        # Some biases have no gradient but for rounding, and stay near zero.
        assert np.linalg.norm(g - e) <= tolerance * max(np.linalg.norm(e), 1.0), variable.path
