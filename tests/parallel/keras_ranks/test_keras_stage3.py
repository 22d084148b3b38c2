"""Stage 3 in Keras: variables are sharded, and `fit` gives what plain Keras gives."""

import gc
import weakref

import keras
import keras_world as world
import numpy as np
import pytest
import stage3_world as stage3
import tensorflow as tf

import zerohvd.keras as zero


def mse():
    return keras.losses.MeanSquaredError()


def units_of(optimizer):
    return optimizer.sharded.units


def test_a_transformer_trains_as_plain_keras_on_the_union_batch():
    model = stage3.compare(
        stage3.transformer, stage3.TOKENS, stage3.NEXT, stage3.crossentropy
    )
    units = [u.name for u in units_of(model.optimizer).all]
    assert len(units) == 3 and units[0] == "(root)", units


@pytest.mark.parametrize("way", world.few(["eager", "recompute off", "steps"], "eager"))
def test_other_ways_to_run(way):
    options = {
        "eager": {"run_eagerly": True},
        "recompute off": {"recompute": False},
        "steps": {"steps_per_execution": 4},
    }[way]
    model = stage3.transformer()
    if way == "steps":  # one loss per 4 steps
        model, opt = zero.zeroify(model, stage3.adamw(), stage=3)
        stage3.fit(model, opt, stage3.TOKENS, stage3.NEXT, stage3.crossentropy(), alone=False,
                   **options)
        plain = stage3.transformer()
        stage3.fit(plain, stage3.adamw(), stage3.TOKENS, stage3.NEXT, stage3.crossentropy(),
                   alone=True, **options)
        stage3.assert_same_weights(model, plain)
        return
    stage3.compare(
        stage3.transformer, stage3.TOKENS, stage3.NEXT, stage3.crossentropy, **options
    )


def mlp(norm=False, **dense):
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Input((7,)), keras.layers.Dense(33, activation="tanh", **dense)]
    if norm:
        layers.append(keras.layers.BatchNormalization())
    return keras.Sequential([*layers, keras.layers.Dense(1, **dense)])


class Custom(keras.Model):
    """A subclassed model with a list of layers and one that is used twice."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(24, activation="tanh")
        self.hidden = [keras.layers.Dense(24, activation="tanh") for _ in range(3)]
        self.last = keras.layers.Dense(1)

    def call(self, x):
        x = self.first(x)
        for layer in (*self.hidden, self.hidden[0]):
            x = x + layer(x)
        return self.last(x)


def custom():
    keras.utils.set_random_seed(7)
    model = Custom()
    model(np.zeros((1, 7), "float32"))
    return model


@pytest.mark.parametrize("make", [mlp, custom])
def test_sequential_and_subclassed_models(make):
    stage3.compare(make, stage3.X, stage3.Y, mse, persist_below=0)


def same_batch():
    """Every rank has the same samples: dropout masks and statistics are then plain Keras'."""
    part = stage3.PER_RANK * stage3.STEPS
    return stage3.TOKENS[:part], stage3.NEXT[:part]


def train_on_same(model, optimizer, eager=False):
    x, y = same_batch()
    model.compile(optimizer=optimizer, loss=stage3.crossentropy(), run_eagerly=eager)
    seen = stage3.Losses()
    model.fit(stage3.data(x, y, stage3.PER_RANK), verbose=0, callbacks=[seen])
    return seen.found


@pytest.mark.parametrize("eager", world.few([False, True], ""))
def test_dropout_has_the_same_mask_when_backward_recomputes(eager):
    plain = stage3.transformer(dropout=0.2)
    expected = train_on_same(plain, stage3.adamw())
    model, opt = zero.zeroify(stage3.transformer(dropout=0.2), stage3.adamw(), stage=3)
    np.testing.assert_allclose(train_on_same(model, opt, eager), expected, rtol=1e-6, atol=1e-6)
    stage3.assert_same_weights(model, plain)


@world.at_two_ranks
def test_float64_is_that_of_plain_keras_to_the_last_digits():
    keras.config.set_dtype_policy("float64")
    try:
        expected = train_on_same(stage3.transformer(dropout=0.2), stage3.adamw())
        model, opt = zero.zeroify(stage3.transformer(dropout=0.2), stage3.adamw(), stage=3)
        assert {v.dtype for v in model.trainable_variables} == {"float64"}
        got = train_on_same(model, opt)
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-7)


def normed():
    keras.utils.set_random_seed(7)
    tokens = keras.Input((stage3.LENGTH,), dtype="int32")
    x = keras.layers.Embedding(stage3.VOCABULARY, 16)(tokens)
    for _ in range(2):
        x = keras.layers.Conv1D(16, 3, padding="same")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(x)
    return keras.Model(tokens, keras.layers.Dense(stage3.VOCABULARY)(x))


def test_statistics_of_batch_norm_are_updated_once():
    def sgd():
        return keras.optimizers.SGD(0.05)

    plain = normed()
    expected = train_on_same(plain, sgd())
    model, opt = zero.zeroify(normed(), sgd(), stage=3, units=keras.layers.Layer)
    np.testing.assert_allclose(train_on_same(model, opt), expected, rtol=1e-6, atol=1e-6)
    stage3.assert_same_weights(model, plain)


def test_two_ranks_give_the_bits_of_stage_2_where_nothing_is_recomputed():
    found = []
    for options in ({"stage": 2}, {"stage": 3, "recompute": False}):
        model, opt = zero.zeroify(stage3.transformer(), stage3.adamw(), **options)
        stage3.fit(model, opt, stage3.TOKENS, stage3.NEXT, stage3.crossentropy(), alone=False)
        with zero.gathered(model):
            found.append([v.numpy() for v in model.weights])
    for a, b in zip(*found, strict=True):
        if world.SIZE <= 2:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_each_rank_keeps_its_share_of_the_variables_and_nothing_else():
    model = stage3.transformer()
    psi = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    model, opt = zero.zeroify(model, stage3.adamw(), stage=3, persist_below=0)
    report = zero.memory_report(opt)
    # Parts start at multiples of 16 elements: what padding costs is bounded by the layout.
    padding = opt.sharded.layout.padding
    assert report.params <= 4 * (psi + padding) / world.SIZE + 64
    total = sum(int(np.prod(v.zero_shard.piece.shape)) for v in model.trainable_variables)
    assert world.hvd.allreduce(tf.constant(total), op=world.hvd.Sum, name="held") == psi


def test_the_memory_of_the_original_variables_is_freed():
    model = mlp()
    originals = [weakref.ref(v.value) for v in model.trainable_variables]
    zero.zeroify(model, stage3.adamw(), stage=3, persist_below=0)
    gc.collect()
    assert [r() for r in originals] == [None] * 4


def test_evaluate_predict_and_train_on_batch():
    plain = mlp()
    plain.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    model, opt = zero.zeroify(mlp(), keras.optimizers.Adam(0.01), stage=3, persist_below=0)
    model.compile(optimizer=opt, loss="mse")
    for step in range(4):
        plain.train_on_batch(*world.union(step))
        model.train_on_batch(*world.batch(step))
    x, y = world.union(0)
    expected = plain.predict(x, verbose=0)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        model.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), rtol=1e-5
    )


@pytest.mark.parametrize("eager", [False, True])
def test_a_loop_of_ones_own(eager):
    plain = mlp()
    expected = world.loop(plain, keras.optimizers.Adam(0.01), reduce=True)
    model, opt = zero.zeroify(mlp(), keras.optimizers.Adam(0.01), stage=3, persist_below=0)
    variables = model.trainable_variables

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = step if eager else tf.function(step)
    for s in range(world.STEPS):
        x, y = world.batch(s)
        run(tf.constant(x), tf.constant(y))
    with zero.gathered(model):
        world.assert_same(world.weights(model), expected, bitwise=False, tolerance=1e-5)


def test_one_trace_for_all_steps(monkeypatch):
    model, opt = zero.zeroify(mlp(), stage3.adamw(), stage=3, persist_below=0)
    traces = []
    run = opt.step.run
    monkeypatch.setattr(opt.step, "run", lambda *a: (traces.append(1), run(*a)))
    model.compile(optimizer=opt, loss="mse")
    for _ in range(2):
        model.fit(zero.shard_dataset(stage3.data(stage3.X, stage3.Y)), verbose=0, epochs=2)
    assert len(traces) <= 2  # Keras traces twice to make its variables


def test_a_dataset_of_unknown_size_ends_without_a_hang():
    model, opt = zero.zeroify(mlp(), stage3.adamw(), stage=3, persist_below=0)
    model.compile(optimizer=opt, loss="mse")

    def generate():
        yield from (world.batch(s) for s in range(world.STEPS))

    spec = (tf.TensorSpec([None, 7]), tf.TensorSpec([None, 1]))
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    model.fit(data, epochs=3, verbose=0, validation_data=data)
    assert int(opt.iterations) == 3 * world.STEPS


def test_uneven_batches_count_by_samples():
    def make():
        return mlp()

    x, y = stage3.X[:13], stage3.Y[:13]
    plain = make()
    plain.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    plain.fit(stage3.data(x, y, 5).concatenate(
        tf.data.Dataset.from_tensor_slices((x[10:], y[10:])).batch(5)), verbose=0)
    model, opt = zero.zeroify(make(), keras.optimizers.SGD(0.1), stage=3, persist_below=0)
    model.compile(optimizer=opt, loss="mse")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    model.fit(zero.shard_dataset(data), verbose=0)
    stage3.assert_same_weights(model, plain)


def test_a_weight_that_comes_after_the_gradients_is_refused():
    model, opt = zero.zeroify(mlp(), stage3.adamw(), stage=3, persist_below=0)
    x, y = world.batch(0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    grads = tape.gradient(loss, model.trainable_variables)
    zero.weight(len(x))
    with pytest.raises(ValueError, match="before the gradients are computed"):
        opt.apply(grads, model.trainable_variables)
