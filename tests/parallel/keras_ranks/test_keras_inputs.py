"""What models are made of and trained on: sequences, layers without an Input, nested inputs."""

import horovod.tensorflow as hvd
import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero

RANKS = (2, 3)  # every test traces graphs
# Of three ranks, Horovod adds up in an order that depends on which tensors it has fused.
LOOSE = 1e-5

LENGTH, WORDS = 5, 11
_rng = np.random.default_rng(1)
TOKENS = _rng.integers(0, WORDS, size=(6 * world.SIZE + 1, LENGTH))
NEXT = _rng.integers(0, WORDS, size=TOKENS.shape)


class Averaged(keras.optimizers.SGD):
    """The oracle: plain Keras on gradients that plain Horovod averaged."""

    def apply(self, grads, trainable_variables=None):
        dense = [tf.convert_to_tensor(g) for g in grads]
        means = [hvd.allreduce(g, op=hvd.Average, name=f"in_fit{i}") for i, g in enumerate(dense)]
        super().apply(means, trainable_variables)


def fitted(make_model, fit, loss="mse", stage=2, **options):
    """The weights after `fit(model)`, plain and sharded."""
    results = []
    for distributed in (False, True):
        keras.utils.set_random_seed(7)
        model = make_model()
        optimizer = Averaged(0.1, **options)
        if distributed:
            plain = keras.optimizers.SGD(0.1, **options)
            optimizer = zero.DistributedOptimizer(plain, stage=stage)
        model.compile(optimizer, loss=loss)
        fit(model)
        results.append(world.weights(model))
    return results


def language_model(*layers, mask=False):
    embedding = keras.layers.Embedding(WORDS, 8, mask_zero=mask)
    head = keras.layers.Dense(WORDS, "softmax")
    return keras.Sequential([keras.Input((None,)), embedding, *layers, head])


def tokens():
    mine = slice(world.RANK, None, world.SIZE)
    return tf.data.Dataset.from_tensor_slices((TOKENS[mine][:6], NEXT[mine][:6])).batch(4)


SEQUENCES = {
    "head_per_token": lambda: language_model(),
    "masked_gru": lambda: language_model(keras.layers.GRU(7, return_sequences=True), mask=True),
    "masked_lstm": lambda: language_model(keras.layers.LSTM(7, return_sequences=True), mask=True),
    "normalized": lambda: language_model(keras.layers.Dense(6), keras.layers.LayerNormalization()),
}


@pytest.mark.parametrize("kind", world.few(SEQUENCES, "head_per_token masked_gru"))
@pytest.mark.parametrize("stage", world.few("012", "2"))
def test_sequences_in_batches_of_unknown_size(kind, stage):
    crossentropy = "sparse_categorical_crossentropy"
    got, expected = fitted(
        SEQUENCES[kind], lambda m: m.fit(tokens(), epochs=2, verbose=0), crossentropy, int(stage)
    )
    world.assert_same(got, expected, tolerance=2e-6)


def generated():
    for x, y in tokens():
        yield x.numpy(), y.numpy()


TOKEN_SPEC = tf.TensorSpec((None, LENGTH), tf.int64)
SOURCES = {
    "generator": lambda: (x for _ in range(2) for x in generated()),
    "from_generator": lambda: tf.data.Dataset.from_generator(
        generated, output_signature=(TOKEN_SPEC, TOKEN_SPEC)
    ).repeat(2),
}


@world.at_two_ranks
@pytest.mark.parametrize("options", [{}, {"clipnorm": 0.1}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("source", SOURCES)
def test_sequences_from_generators(source, options):
    got, expected = fitted(
        language_model,
        lambda m: m.fit(SOURCES[source](), steps_per_epoch=4, verbose=0),
        "sparse_categorical_crossentropy",
        **options,
    )
    world.assert_same(got, expected, bitwise=False, tolerance=1e-6)


def test_sequences_of_a_sharded_dataset():
    """With a rest in the last batch; no mask, so that samples count alike."""
    results = []
    for distributed in (False, True):
        data = tf.data.Dataset.from_tensor_slices((TOKENS, NEXT)).batch(3 * world.SIZE)
        keras.utils.set_random_seed(7)
        model, optimizer = language_model(), keras.optimizers.SGD(0.1)
        if distributed:
            data, optimizer = zero.shard_dataset(data), zero.DistributedOptimizer(optimizer)
        model.compile(optimizer, loss="sparse_categorical_crossentropy")
        model.fit(data, epochs=2, verbose=0)
        results.append(world.weights(model))
    world.assert_same(*results[::-1], bitwise=False, tolerance=2e-6)


def test_sequences_in_a_loop_with_an_input_signature():
    results = []
    for distributed in (False, True):
        keras.utils.set_random_seed(7)
        model, optimizer = language_model(), Averaged(0.1)
        if distributed:
            optimizer = zero.DistributedOptimizer(keras.optimizers.SGD(0.1))

        @tf.function(input_signature=[TOKEN_SPEC, TOKEN_SPEC])
        def step(x, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(y, model(x))
                loss = tf.reduce_mean(losses)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        for x, y in tokens():
            step(x, y)
        results.append(world.weights(model))
    world.assert_same(*results[::-1], tolerance=LOOSE)


# -- models that take their shapes from the data ---------------------------------------------------


def no_input_layer():
    return keras.Sequential(
        [
            keras.layers.Dense(9, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = keras.layers.Dense(9, "tanh"), keras.layers.Dense(1)

    def call(self, x):
        return self.head(self.hidden(x))


def rows():
    parts = [world.batch(s) for s in range(world.STEPS)]
    return tuple(np.concatenate([p[i] for p in parts]) for i in (0, 1))


FITS = {
    "arrays": lambda m: m.fit(*rows(), batch_size=3, shuffle=False, verbose=0),
    "dataset": lambda m: m.fit(tf.data.Dataset.from_tensor_slices(rows()).batch(3), verbose=0),
    "batches": lambda m: [m.train_on_batch(*world.batch(s)) for s in range(world.STEPS)],
}


@pytest.mark.parametrize("way", world.few(FITS, "dataset"))
@pytest.mark.parametrize("make", [no_input_layer, Subclassed])
def test_models_without_an_input_layer(make, way):
    got, expected = fitted(make, FITS[way])
    world.assert_same(got, expected)


@world.at_two_ranks
@pytest.mark.parametrize("options", [{"steps_per_execution": 2}, {"run_eagerly": True}])
def test_models_without_an_input_layer_and_ways_to_run_them(options):
    def fit(model):
        model.compile(model.optimizer, loss="mse", metrics=["mae"], **options)
        FITS["dataset"](model)

    got, expected = fitted(no_input_layer, fit)
    world.assert_same(got, expected)


@world.at_two_ranks
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
def test_models_without_an_input_layer_in_16_bits(policy):
    """As if they had been built before."""
    results = []
    keras.config.set_dtype_policy(policy)
    try:
        for built in (False, True):
            keras.utils.set_random_seed(7)
            model = Subclassed()
            if built:
                model(world.X[:1])
            model.compile(zero.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
            FITS["dataset"](model)
            results.append(world.weights(model))
    finally:
        keras.config.set_dtype_policy("float32")
    world.assert_same(*results, tolerance=LOOSE)


def test_different_initial_weights_without_an_input_layer_become_those_of_rank_0():
    keras.utils.set_random_seed(world.RANK)
    model = Subclassed()
    model.compile(zero.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    model.fit(*rows(), verbose=0)
    world.assert_ranks_agree(world.weights(model))
    assert np.linalg.norm(world.weights(model)[0]) > 0


def test_a_loop_over_a_model_without_an_input_layer():
    """As in Horovod's example of a custom loop: the first traced step makes the variables."""
    results = []
    for distributed in (False, True):
        keras.utils.set_random_seed(7)
        model, optimizer = no_input_layer(), Averaged(0.1)
        if distributed:
            optimizer = zero.DistributedOptimizer(keras.optimizers.SGD(0.1))

        @tf.function
        def step(x, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        for s in range(world.STEPS):
            step(*(tf.constant(t) for t in world.batch(s)))
        results.append(world.weights(model))
    world.assert_same(*results[::-1], tolerance=LOOSE)


OPTIONS = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "average": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "sums": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("option", world.few(OPTIONS, "clipnorm average"))
def test_a_scalar_beside_an_embedding_table(option):
    """Fewer elements than ranks, and sparse gradients."""
    results = []
    for distributed in (False, True):
        scale = tf.Variable(0.5, name="scale")
        table = tf.Variable(np.ones((WORDS, 1), "float32"), name="embedding")
        optimizer = Averaged(0.1, **OPTIONS[option])
        if distributed:
            inner = keras.optimizers.SGD(0.1, **OPTIONS[option])
            optimizer = zero.DistributedOptimizer(inner)

        variables = [scale, table]

        @tf.function(input_signature=[tf.TensorSpec([None, LENGTH], tf.int64)])
        def step(words, variables=variables, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = variables[0] * tf.reduce_sum(tf.gather(variables[1], words) ** 2)
            optimizer.apply(tape.gradient(loss, variables), variables)

        for start in range(4):
            step(TOKENS[start + world.RANK :: world.SIZE][:3])
        results.append([scale.numpy(), table.numpy()])
    world.assert_same(*results[::-1], bitwise=False, tolerance=1e-6)
