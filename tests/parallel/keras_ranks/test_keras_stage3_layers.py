"""Stage 3 in Keras: layers and options, each against plain Keras on the union batch."""

import keras
import keras_world as world
import numpy as np
import pytest
import stage3_world as stage3
import tensorflow as tf
from keras import layers, ops

import zerohvd.keras as zero
from zerohvd.keras.stage3 import rows

RANKS = (2, 3)  # every test traces graphs

ROWS = stage3.PER_RANK * world.SIZE * 4
_rng = np.random.default_rng(3)
SEQUENCES = _rng.normal(size=(ROWS, 8, 6)).astype("float32")
IMAGES = _rng.normal(size=(ROWS, 8, 8, 3)).astype("float32")
TOKENS = _rng.integers(0, 20, (ROWS, 8)).astype("int32")
TARGETS = _rng.normal(size=(ROWS, 2)).astype("float32")
TOKENS[:, 5:] = 0  # padding, for masks


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def mse():
    return keras.losses.MeanSquaredError()


def on(shape, *inner, dtype="float32"):
    """A function that makes a functional model of these layers."""

    def make():
        keras.utils.set_random_seed(5)
        x = inputs = keras.Input(shape, dtype=dtype)
        for layer in inner:
            x = layer()(x)
        return keras.Model(inputs, layers.Dense(2)(x))

    return make


def every_layer(layer):
    return not isinstance(layer, layers.InputLayer)


LAYERS = {
    "conv1d": (SEQUENCES, [lambda: layers.Conv1D(5, 3), layers.Flatten]),
    "conv2d": (
        IMAGES,
        [lambda: layers.Conv2D(5, 3), lambda: layers.Conv2DTranspose(4, 3), layers.Flatten],
    ),
    "gru": (SEQUENCES, [lambda: layers.GRU(5, return_sequences=True), lambda: layers.GRU(4)]),
    "bidirectional": (SEQUENCES, [lambda: layers.Bidirectional(layers.LSTM(4))]),
    "masked": (
        TOKENS,
        [lambda: layers.Embedding(20, 6, mask_zero=True), lambda: layers.LSTM(5)],
    ),
    "regularized": (
        SEQUENCES,
        [
            layers.Flatten,
            lambda: layers.Dense(9, kernel_regularizer="l2", activity_regularizer="l1"),
        ],
    ),
    "constrained": (
        SEQUENCES,
        [layers.Flatten, lambda: layers.Dense(9, kernel_constraint=keras.constraints.MaxNorm(0.5))],
    ),
    "nested": (
        SEQUENCES,
        [
            layers.Flatten,
            lambda: keras.Sequential([layers.Dense(9), layers.Dense(9, activation="relu")]),
            lambda: keras.Sequential([layers.Dense(9), layers.Dense(9, activation="relu")]),
        ],
    ),
    "attention": (
        SEQUENCES,
        [lambda: Attention(), layers.GlobalAveragePooling1D],
    ),
}


class Attention(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attend = layers.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.attend.build(shape, shape)

    def call(self, x, training=None, scale=1.0):
        return x + scale * self.attend(x, x, use_causal_mask=True)

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.parametrize("case", world.few(LAYERS, "bidirectional regularized constrained"))
def test_layers(case):
    x, inner = LAYERS[case]
    make = on(x.shape[1:], *inner, dtype=str(x.dtype))
    model = stage3.compare(make, x, TARGETS, mse, sgd, persist_below=0, units=None)
    assert len(model.optimizer.sharded.units.all) > 1


class Tied(keras.Model):
    """The embedding is used to read and to write; its variable is read outside of its layer."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(20, 6)
        self.hidden = [layers.Dense(6, activation="tanh") for _ in range(2)]

    def call(self, tokens):
        x = ops.mean(self.embed(tokens), 1)
        for layer in self.hidden:
            x = layer(x)
        return ops.matmul(x, ops.transpose(self.embed.embeddings))


class AddsLoss(layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        y = self.dense(x)
        self.add_loss(0.1 * ops.mean(y**2))
        return y


def called(make, example):
    def made():
        keras.utils.set_random_seed(5)
        model = make()
        model(example)
        return model

    return made


def test_tied_embeddings():
    targets = np.repeat(TARGETS, 10, 1)
    stage3.compare(called(Tied, TOKENS[:1]), TOKENS, targets, mse, sgd, persist_below=0)


def test_losses_added_inside_of_a_unit_count_once():
    make = on((8, 6), layers.Flatten, AddsLoss, AddsLoss)
    stage3.compare(make, SEQUENCES, TARGETS, mse, sgd, persist_below=0, units=AddsLoss)


OPTIONS = {
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1, epsilon=1e-4),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


def two_dense():
    return on((8, 6), layers.Flatten, lambda: layers.Dense(9, activation="tanh"))()


@pytest.mark.parametrize("case", world.few(OPTIONS, "clipnorm lamb ema"))
def test_options_of_the_optimizer(case):
    stage3.compare(two_dense, SEQUENCES, TARGETS, mse, OPTIONS[case], persist_below=0)


@world.at_two_ranks
def test_weight_decay_is_excluded_by_name_and_by_variable():
    found = []
    for stage in (2, 3):
        model = two_dense()
        inner = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        inner.exclude_from_weight_decay(var_names=["bias"])
        inner.exclude_from_weight_decay(var_list=[model.layers[-1].kernel])
        model, opt = zero.zeroify(model, inner, stage=stage, persist_below=0)
        stage3.fit(model, opt, SEQUENCES, TARGETS, mse(), alone=False)
        with zero.gathered(model):
            found.append([v.numpy() for v in model.weights])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("policy", world.few(["mixed_float16", "mixed_bfloat16"], ""))
def test_mixed_precision(policy):
    found = []
    keras.config.set_dtype_policy(policy)
    try:
        for stage in (2, 3):
            model, opt = zero.zeroify(
                two_dense(), keras.optimizers.SGD(0.1), stage=stage, persist_below=0
            )
            losses = stage3.fit(model, opt, SEQUENCES, TARGETS, mse(), alone=False)
            found.append(losses)
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)


@world.at_two_ranks
def test_several_inputs_and_outputs():
    def make():
        keras.utils.set_random_seed(5)
        a, b = keras.Input((8, 6)), keras.Input((8, 6))
        x = layers.Concatenate()([layers.Dense(6)(a), layers.Dense(6)(b)])
        x = layers.Flatten()(x)
        return keras.Model([a, b], [layers.Dense(2)(x), layers.Dense(2)(x)])

    plain = make()
    model, opt = zero.zeroify(make(), sgd(), stage=3, persist_below=0)
    for one, optimizer, part in ((plain, sgd(), slice(None)), (model, opt, None)):
        one.compile(optimizer=optimizer, loss=["mse", "mae"])
        rows = part or slice(world.RANK, None, world.SIZE)
        x = SEQUENCES[rows]
        for _ in range(3):
            one.train_on_batch([x, x + 1], [TARGETS[rows], TARGETS[rows]])
    stage3.assert_same_weights(model, plain)


@world.at_two_ranks
def test_frozen_layers_and_a_layer_frozen_later():
    def make():
        model = on((8, 6), layers.Flatten, lambda: layers.Dense(9), lambda: layers.Dense(9))()
        model.layers[2].trainable = False
        return model

    model = stage3.compare(make, SEQUENCES, TARGETS, mse, sgd, persist_below=0)
    model.layers[3].trainable = False
    with zero.gathered(model):
        before = [v.numpy() for v in model.layers[3].weights]
    stage3.fit(model, model.optimizer, SEQUENCES, TARGETS, mse(), alone=False)
    with zero.gathered(model):
        after = [v.numpy() for v in model.layers[3].weights]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_unfrozen_layer_trains_after_zeroify_with_a_new_optimizer():
    def run(zeroed):
        model = on((8, 6), layers.Flatten, lambda: layers.Dense(9), lambda: layers.Dense(9))()
        model.layers[2].trainable = False
        for _ in range(2):
            optimizer = keras.optimizers.SGD(0.05)
            if zeroed:
                model, optimizer = zero.zeroify(model, optimizer, stage=3, persist_below=0)
            stage3.fit(model, optimizer, SEQUENCES, TARGETS, mse(), alone=not zeroed)
            model.layers[2].trainable = True
        return model

    stage3.assert_same_weights(run(True), run(False))


@world.at_two_ranks
def test_two_models_with_two_optimizers_in_one_step():
    def models():
        keras.utils.set_random_seed(5)
        return [
            keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="tanh"),
                              layers.Dense(n)])
            for n in (6, 1)
        ]

    def train(one, two, first, second, x):
        @tf.function
        def step(noise, real):
            with tf.GradientTape() as tape:
                made = one(noise)
                loss = tf.reduce_mean(two(real)) - tf.reduce_mean(two(made))
            second.apply(tape.gradient(loss, two.trainable_variables), two.trainable_variables)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(two(one(noise)) ** 2)
            first.apply(tape.gradient(loss, one.trainable_variables), one.trainable_variables)

        for i in range(3):
            step(tf.constant(x[:, i]), tf.constant(x[:, i + 1]))

    plain = models()
    train(*plain, keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1), SEQUENCES)
    one, two = models()
    one, first = zero.zeroify(one, keras.optimizers.SGD(0.1), stage=3, persist_below=0)
    two, second = zero.zeroify(two, keras.optimizers.SGD(0.1), stage=3, persist_below=0)
    train(one, two, first, second, SEQUENCES[world.RANK :: world.SIZE])
    stage3.assert_same_weights(one, plain[0])
    stage3.assert_same_weights(two, plain[1])


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


@world.at_two_ranks
def test_a_train_step_of_ones_own():
    def make():
        base = two_dense()
        return OwnStep(base.inputs, base.outputs)

    plain = make()
    plain.compile(optimizer=sgd(), loss="mse")
    plain.fit(stage3.data(SEQUENCES, TARGETS), verbose=0)
    model, opt = zero.zeroify(make(), sgd(), stage=3, persist_below=0)
    model.compile(optimizer=opt, loss="mse")
    model.fit(zero.shard_dataset(stage3.data(SEQUENCES, TARGETS)), verbose=0)
    stage3.assert_same_weights(model, plain)


def test_units_are_chosen_as_in_pytorch():
    def names(**options):
        _, opt = zero.zeroify(stage3.transformer(), stage3.adamw(), stage=3, **options)
        return [type(u.layer).__name__ for u in opt.sharded.units.all[1:]]

    assert names() == ["Block", "Block"]
    assert names(units=layers.Dense) == ["Dense"] * 6
    assert names(units=(stage3.Block,)) == ["Block", "Block"]
    assert names(units=lambda layer: "attention" in layer.name) == ["MultiHeadAttention"] * 2


@world.at_two_ranks
def test_a_unit_in_a_branch_of_the_graph_is_refused():
    class Sometimes(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = [layers.Dense(6) for _ in range(2)]

        def call(self, x):
            x = self.inner[0](x)
            return tf.cond(tf.reduce_sum(x) > 0, lambda: self.inner[1](x), lambda: x)

    model = called(Sometimes, np.zeros((1, 6), "float32"))()
    model, _ = zero.zeroify(model, sgd(), stage=3, persist_below=0)
    with pytest.raises(zero.ZeroError, match="inside a branch"):
        tf.function(model, autograph=False)(tf.ones((2, 6)))


class Noisy(layers.Layer):
    """Draws numbers that the recomputation could not draw again."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x) + tf.random.normal([6])


class Peeking(layers.Layer):
    """Uses a tensor that it is not given."""

    def __init__(self, source):
        super().__init__()
        self.dense, self.source = layers.Dense(6), source

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x) * self.source()


@pytest.mark.parametrize("eager", world.few([False, True], ""))
def test_what_backward_could_not_repeat_is_refused(eager):
    seen = []
    noisy = keras.Sequential([keras.Input((6,)), layers.Dense(6), Noisy()])
    x = tf.ones((2, 6))

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers.Dense(6), Peeking(lambda: seen[0])

        def call(self, x):
            seen[:] = [self.first(x)]
            return self.second(x)

    peeking = Model()
    peeking(x)
    for model, units, said in ((noisy, Noisy, "draws random"), (peeking, Peeking, "would be lost")):
        model, _ = zero.zeroify(model, sgd(), stage=3, persist_below=0, units=units)

        def step(model=model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x))
            return tape.gradient(loss, model.trainable_variables)

        with pytest.raises(zero.ZeroError, match=said):
            (step if eager else tf.function(step, autograph=False))()


def gradient_penalty(model, x):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)
        loss = tf.reduce_mean(tape.gradient(y, x) ** 2)
    return outer.gradient(loss, model.trainable_variables)


@world.at_two_ranks
def test_gradients_of_gradients_need_recompute_off():
    def make():
        keras.utils.set_random_seed(5)
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
        )

    x = tf.constant(SEQUENCES[:4, 0])
    expected = gradient_penalty(make(), x)
    model, _ = zero.zeroify(make(), sgd(), stage=3, persist_below=0, recompute=False)
    for variable, got, whole in zip(
        model.trainable_variables, gradient_penalty(model, x), expected, strict=True
    ):
        span = variable.zero_shard.span
        if whole is not None:
            part = tf.reshape(whole, [-1])[span.start : span.stop] * world.SIZE
            np.testing.assert_allclose(got, part, rtol=1e-5, atol=1e-7)
    model, _ = zero.zeroify(make(), sgd(), stage=3, persist_below=0)
    with pytest.raises(zero.ZeroError, match="recompute=False"):
        gradient_penalty(model, x)


@pytest.fixture
def small_tables(monkeypatch):
    """Tables of a few rows are sharded by rows."""
    monkeypatch.setattr(rows, "ROWS_FROM_BYTES", 1000)
    monkeypatch.setattr(rows, "MOST_PADDING", 1.0)


@pytest.mark.parametrize("width", [7, 16])
def test_a_large_embedding_is_sharded_by_rows_and_never_gathered(small_tables, width):
    def make():
        return on((8,), lambda: layers.Embedding(101, width), layers.Flatten, dtype="int32")()

    x = _rng.integers(0, 101, TOKENS.shape).astype("int32")
    x[0] = [0, 100, -1, 5, 5, 5, 50, 51]
    model = stage3.compare(make, x, TARGETS, mse, lambda: keras.optimizers.SGD(0.5))
    units = model.optimizer.sharded.units
    assert [u.table is not None for u in units.all[1:]].count(True) == 1
    moved = zero.communication_report(model.optimizer)
    assert world.SIZE == 1 or moved["alltoall"].bytes < 101 * width * 4, moved


TABLES = {
    "adam": {"optimizer": lambda: keras.optimizers.Adam(0.01, clipvalue=0.01)},
    "accumulation": {"optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
    "norm": {"optimizer": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01)},
    "ema": {"optimizer": lambda: keras.optimizers.SGD(0.1, use_ema=True)},
    "lamb": {"optimizer": lambda: keras.optimizers.Lamb(0.01)},
    "eager": {"optimizer": sgd, "run_eagerly": True},
}


class Tokens(layers.Layer):
    """A table inside of a layer that would be a unit."""

    def __init__(self):
        super().__init__()
        self.table, self.place = layers.Embedding(211, 5), layers.Embedding(8, 5)

    def build(self, shape):
        self.table.build(shape)
        self.place.build(shape)

    def call(self, x):
        return self.table(x) + self.place(ops.arange(8))

    def compute_output_shape(self, shape):
        return (*shape, 5)


@pytest.mark.parametrize("case", world.few(TABLES, "adam eager"))
def test_a_table_is_updated_as_plain_keras_updates_it(small_tables, case):
    # No token twice in a batch: plain Keras squares the gradients of a row one by one.
    batch = stage3.PER_RANK * world.SIZE
    x = np.concatenate([_rng.permutation(211)[: batch * 8].reshape(batch, 8) for _ in range(4)])
    make = on((8,), Tokens, layers.Flatten, dtype="int32")
    model = stage3.compare(make, x.astype("int32"), TARGETS, mse, persist_below=0, **TABLES[case])
    units = {type(u.layer).__name__: u for u in model.optimizer.sharded.units.all}
    assert units["Embedding"].table is not None


class Structured(layers.Layer):
    """Takes and gives dictionaries, tuples and None."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(6), layers.Dense(6)

    def build(self, shape):
        self.first.build((None, 6))
        self.second.build((None, 6))

    def call(self, given, scale=None, how=None):
        h = given["h"]
        return {"h": self.first(h) * scale, "more": (self.second(h), None)}


class StructuredModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = [Structured() for _ in range(2)]
        self.last = layers.Dense(2)

    def call(self, x):
        h, total = x[:, 0], 0.0
        for layer in self.inner:
            found = layer({"h": h}, scale=1.0 + ops.mean(x, axis=(1, 2))[:, None], how=("a", 1))
            h, total = found["h"], total + found["more"][0]
        return self.last(h + total)


@world.at_two_ranks
def test_layers_may_take_and_give_structures():
    make = called(StructuredModel, SEQUENCES[:1])
    model = stage3.compare(make, SEQUENCES, TARGETS, mse, sgd, persist_below=0)
    assert len(model.optimizer.sharded.units.all) == 3
