"""Losses that are no means over samples, on parts of batches, are those of the whole batch."""

import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero

RANKS = (2, 3)  # every test traces graphs

BATCH = 3 * world.SIZE
TOKENS = 5
losses = keras.losses

# loss, whether words are masked, sample weights: none, per sample or per token
KINDS = {
    "sum": (lambda: losses.SparseCategoricalCrossentropy(reduction="sum"), False, None),
    "weighted_mean": (
        lambda: losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
        False,
        "token",
    ),
    "masked": (losses.SparseCategoricalCrossentropy, True, None),
    "masked_weights": (losses.SparseCategoricalCrossentropy, True, "token"),
    "masked_weighted_mean": (
        lambda: losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
        True,
        "token",
    ),
    "masked_sum": (lambda: losses.SparseCategoricalCrossentropy(reduction="sum"), True, None),
    "mean": (losses.SparseCategoricalCrossentropy, False, "token"),
}
RESTS = {"even": 0, "uneven": world.SIZE + 1, "one": 1}


def words(count, weighted, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(1, 9, size=(count, TOKENS)).astype("int32")
    lengths = rng.integers(1, TOKENS + 1, size=count)
    x[np.arange(TOKENS)[None] >= lengths[:, None]] = 0
    y = rng.integers(0, 3, size=(count, TOKENS))
    weight = rng.uniform(0.1, 4.0, size=(count, TOKENS)).astype("float32")
    return (x, y, weight) if weighted else (x, y)


def tagger(masked):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((TOKENS,), dtype="int32"),
            keras.layers.Embedding(9, 4, mask_zero=masked),
            keras.layers.Dense(3, "softmax", kernel_regularizer="l2"),
        ]
    )


def fit(model, optimizer, loss, parts, *, distributed, rest, validation=True, **options):
    """The weights, and what epochs and an evaluation of its own report."""
    drop = rest == "even"
    data, test = (
        tf.data.Dataset.from_tensor_slices(p).batch(BATCH, drop_remainder=drop) for p in parts
    )
    optimizer = zero.DistributedOptimizer(optimizer, stage=2) if distributed else optimizer
    model.compile(optimizer, loss, **options)
    shard = zero.shard_dataset if distributed else (lambda d: d)
    averages = {"callbacks": [zero.callbacks.MetricAverage()] if distributed else []}
    history = model.fit(
        shard(data), epochs=2, verbose=0, validation_data=shard(test) if validation else None,
        **averages,
    )  # fmt: skip
    found = np.atleast_1d(model.evaluate(shard(test), verbose=0, **averages))
    return world.weights(model), {**history.history, "evaluate": found}


def assert_alike(got, expected):
    world.assert_same(got[0], expected[0], bitwise=False, tolerance=1e-5)
    for name, values in expected[1].items():
        np.testing.assert_allclose(got[1][name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("rest", ["even", "one"])
@pytest.mark.parametrize("kind", world.few(KINDS, "sum masked_weights"))
def test_a_loss_that_is_no_mean_over_samples(kind, rest):
    loss, masked, weights = KINDS[kind]
    results = []
    for distributed in (False, True):
        parts = [words(2 * BATCH + RESTS[rest], weights, seed) for seed in (0, 1)]
        optimizer = keras.optimizers.SGD(0.02)
        results.append(
            fit(tagger(masked), optimizer, loss(), parts, distributed=distributed, rest=rest)
        )
    assert_alike(results[1], results[0])


@pytest.mark.parametrize("rest", world.few(RESTS, "one"))
def test_outputs_with_different_reductions(rest):
    results = []
    for distributed in (False, True):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((TOKENS,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
        outputs = {
            "tags": keras.layers.Dense(3, "softmax", name="tags")(hidden),
            "length": keras.layers.Dense(1, name="length")(
                keras.layers.GlobalAveragePooling1D()(hidden)
            ),
            "plain": keras.layers.Dense(1, name="plain")(keras.layers.Flatten()(hidden)),
        }
        loss = {
            "tags": "sparse_categorical_crossentropy",
            "length": losses.MeanSquaredError(reduction="sum"),
            "plain": "mae",
        }
        x, y = words(2 * BATCH + RESTS[rest], False)
        other = y[:, 0].astype("float32")
        parts = [(x, {"tags": y, "length": other, "plain": other})] * 2
        results.append(
            fit(keras.Model(inputs, outputs), keras.optimizers.SGD(0.005), loss, parts,
                distributed=distributed, rest=rest, validation=False,
                loss_weights={"tags": 1.0, "length": 0.3, "plain": 2.0})
        )  # fmt: skip
    # The losses of single outputs are means over samples with us, over batches in plain Keras.
    for result in results:
        for name in ("tags_loss", "length_loss", "plain_loss"):
            del result[1][name]
    assert_alike(results[1], results[0])


class Adversaries(keras.Model):
    """As in Keras' guides: two optimizers, and none that the model was compiled with."""

    def __init__(self, scaled=False):
        super().__init__()
        self.maker, self.judge = keras.layers.Dense(7, "tanh"), keras.layers.Dense(1)
        self.scaled = scaled

    def compile(self, first, second):
        super().compile(jit_compile=False)
        self.first, self.second = first, second

    def call(self, x):
        return self.judge(self.maker(x))

    def train_step(self, data):
        x, y = data
        groups = (self.maker, self.first), (self.judge, self.second)
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
            if self.scaled:
                loss = self.first.scale_loss(loss)
        for layer, optimizer in groups:
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"now": loss}


@pytest.mark.parametrize("scaled", [False, True] if world.SIZE == 2 else [True])
@pytest.mark.parametrize("rest", world.few(RESTS, "one"))
def test_two_optimizers_on_an_uneven_dataset(rest, scaled):
    results = []
    count = 2 * BATCH + RESTS[rest]
    for distributed in (False, True):
        keras.utils.set_random_seed(3)
        model = Adversaries(scaled)
        both = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)]
        if distributed:
            both = [zero.DistributedOptimizer(o) for o in both]
        model.compile(*both)
        rng = np.random.default_rng(0)
        parts = tuple(rng.normal(size=(count, n)).astype("float32") for n in (7, 1))
        data = tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)
        model.fit(zero.shard_dataset(data) if distributed else data, epochs=2, verbose=0)
        results.append(world.weights(model))
    world.assert_same(results[1], results[0], bitwise=False, tolerance=2e-5)
