"""What ranks are given to train on: parts of the same batches, or the same data by mistake."""

import warnings

import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero

several_ranks = pytest.mark.skipif(world.SIZE == 1, reason="one rank has whole batches")
BATCH, COUNT = 2 * world.SIZE, 6 * world.SIZE + 1  # the last batch has one sample
X, Y = world.X[:COUNT], world.Y[:COUNT]


def samples(*more):
    return tf.data.Dataset.from_tensor_slices((X, Y, *more))


def dense(inputs=7):
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(1)])


def trained(make_model, data, loss):
    """History and weights of one plain process, and of all ranks together."""
    results = []
    for distributed in (False, True):
        keras.utils.set_random_seed(7)
        model, optimizer = make_model(), keras.optimizers.SGD(0.1)
        given = data()
        if distributed:
            given, optimizer = zero.shard_dataset(given), zero.DistributedOptimizer(optimizer)
        model.compile(optimizer, loss=loss)
        callbacks = [zero.callbacks.MetricAverage()] if distributed else []
        history = model.fit(given, epochs=2, verbose=0, callbacks=callbacks)
        results.append([*world.weights(model), np.array(history.history["loss"])])
    return results


# -- kinds of data ---------------------------------------------------------------------------------

WORDS = np.array(["a", "b c", "a c b"])[np.arange(COUNT) % 3]


class Lengths(keras.Model):
    """Reads sentences of any length."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        words = x if isinstance(x, tf.RaggedTensor) else tf.strings.split(x)
        values = words if words.dtype == tf.float32 else tf.cast(words == "a", tf.float32)
        return self.dense(values.to_tensor(shape=[None, 3]))


class Autoencoder(keras.Model):
    """Has no targets; its loss is its own."""

    def __init__(self):
        super().__init__()
        self.code, self.back = keras.layers.Dense(3), keras.layers.Dense(7)

    def call(self, x):
        x = x["x"] if isinstance(x, dict) else x
        found = self.back(self.code(x))
        self.add_loss(tf.reduce_mean((found - x) ** 2))
        return found


class OwnStep(Autoencoder):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            self(data, training=True)
            loss = tf.add_n(self.losses)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        named, x = inputs
        return self.dense(named["a"] + named["b"][0] * named["b"][1] + x)


def of(x, *rest):
    return lambda: tf.data.Dataset.from_tensor_slices((x, *rest) if rest else x).batch(BATCH)


def ragged():
    lengths = np.arange(COUNT) % 3 + 1
    return tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum(), dtype="float32"), lengths)


def sparse_model():
    return keras.Sequential([keras.Input((7,), sparse=True), keras.layers.Dense(1)])


KINDS = {
    "strings": (Lengths, of(WORDS, Y), "mse"),
    "ragged": (Lengths, of(ragged() / 99, Y), "mse"),
    "sparse": (sparse_model, of(tf.sparse.from_dense(np.maximum(X, 0)), Y), "mse"),
    "x_only": (Autoencoder, of(X), None),
    "x_in_a_tuple": (Autoencoder, lambda: of(X)().map(lambda x: (x,)), None),
    "x_in_a_dict": (Autoencoder, of({"x": X}), None),
    "nested": (Nested, of(({"a": X, "b": (X, X)}, X), Y), "mse"),
}


@pytest.mark.parametrize("kind", world.few(KINDS, "strings ragged sparse x_only"))
def test_kinds_of_inputs_train_as_one_process_would(kind):
    expected, got = trained(*KINDS[kind])
    world.assert_same(got, expected, bitwise=False, tolerance=1e-5)


@world.at_two_ranks
def test_a_train_step_of_ones_own_on_inputs_alone():
    keras.utils.set_random_seed(7)
    model = OwnStep()
    model.compile(zero.DistributedOptimizer("sgd"))
    model.fit(zero.shard_dataset(of(X)()), epochs=2, verbose=0)
    world.assert_ranks_agree(world.weights(model))


def test_what_cannot_be_cut_is_refused_with_the_line_to_write():
    with pytest.raises(TypeError, match="from_tensor_slices"):
        zero.shard_dataset((X, Y))
    with pytest.raises(ValueError, match=r"batch_size=.* first dimensions"):
        zero.shard_dataset(samples())
    with pytest.raises(ValueError, match=r"\(\(a, b\), y\)"):
        zero.shard_dataset(tf.data.Dataset.from_tensor_slices((X, X, Y, Y)).batch(2))


# -- the same batches in every epoch ---------------------------------------------------------------

ORDERS = {
    "seed": lambda data: data.shuffle(COUNT, seed=3, reshuffle_each_iteration=True).batch(BATCH),
    "set_seed": lambda data: data.shuffle(COUNT).batch(BATCH),
    "cached": lambda data: data.cache().shuffle(COUNT, seed=3).batch(BATCH).prefetch(2),
    "repeated": lambda data: data.shuffle(COUNT, seed=3).repeat().batch(BATCH),
    "batches": lambda data: data.batch(BATCH).shuffle(3, seed=3).repeat(),
}
REPEATED = {"repeated": 3, "batches": 4}  # steps per epoch


@pytest.mark.parametrize("how", world.few(ORDERS, "seed repeated"))
def test_shuffled_epochs_train_as_one_process_would(how):
    """The metrics of three different epochs, and the weights after them."""
    results = []
    for distributed in (False, True):
        tf.random.set_seed(5)
        data, model, optimizer = ORDERS[how](samples()), dense(), keras.optimizers.SGD(0.1)
        tf.random.set_seed(6)
        if distributed:
            data, optimizer = zero.shard_dataset(data), zero.DistributedOptimizer(optimizer)
        elif world.SIZE > 1:
            list(data.take(1))  # as shard_dataset does, to compare
        model.compile(optimizer, loss="mse")
        history = model.fit(
            data, epochs=3, steps_per_epoch=REPEATED.get(how), verbose=0,
            callbacks=[zero.callbacks.MetricAverage()] if distributed else [],
        )  # fmt: skip
        results.append([*world.weights(model), np.array(history.history["loss"])])
    world.assert_same(results[1], results[0], bitwise=False, tolerance=5e-6)


@several_ranks
def test_an_order_that_differs_after_the_first_batch_is_found():
    """The first batches agree, and so do their number and size."""
    rest = np.random.default_rng(world.RANK).permutation(np.arange(BATCH, COUNT))
    order = np.concatenate([np.arange(BATCH), rest])
    data = tf.data.Dataset.from_tensor_slices((X[order], Y[order])).batch(BATCH)
    model = dense()
    model.compile(zero.DistributedOptimizer("sgd"), loss="mse")
    epochs = []
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    with pytest.raises(zero.DisagreementError, match=r"in epoch 1 ranks \[1.*seed=1"):
        model.fit(zero.shard_dataset(data), epochs=2, verbose=0, callbacks=[watch])
    assert not epochs  # nothing is saved of it
    model.fit(zero.shard_dataset(data, check=False), verbose=0)


@several_ranks
def test_a_rank_that_reads_a_shuffled_dataset_once_more_is_found():
    """Every reading shuffles anew, so that rank is an epoch ahead of the others."""
    data = zero.shard_dataset(samples().shuffle(COUNT, seed=1).batch(BATCH))
    model = dense()
    model.compile(zero.DistributedOptimizer("sgd"), loss="mse")
    model.fit(data, verbose=0)
    if world.RANK == 0:
        model.predict(data, verbose=0)
    with pytest.raises(zero.DisagreementError, match="equally often"):
        model.fit(data, verbose=0)


@several_ranks
def test_a_rank_may_look_at_data_in_a_fixed_order():
    data = zero.shard_dataset(samples().batch(BATCH)).repeat().prefetch(world.RANK + 1)
    if world.RANK == 0:
        next(iter(data))
    model = dense()
    model.compile(zero.DistributedOptimizer("sgd"), loss="mse")
    model.fit(data, epochs=3, steps_per_epoch=2, verbose=0)
    world.assert_ranks_agree(world.weights(model))


# -- the same data on all ranks --------------------------------------------------------------------


def generator(x, y):
    while True:
        yield x[:BATCH], y[:BATCH]


def own(array):
    return array[world.RANK :: world.SIZE][:6]


SAME = {
    "arrays": lambda model: model.fit(X, Y, verbose=0),
    "tensors": lambda model: model.fit(x=tf.constant(X), y=tf.constant(Y), verbose=0),
    "dataset": lambda model: model.fit(samples().batch(BATCH), verbose=0),
    "generator": lambda model: model.fit(generator(X, Y), steps_per_epoch=2, verbose=0),
}
OTHER = {
    "own_arrays": lambda model: model.fit(own(X), own(Y), verbose=0),
    "own_shard": lambda model: model.fit(
        samples().take(6 * world.SIZE).shard(world.SIZE, world.RANK).batch(2), verbose=0
    ),
    "own_generator": lambda model: model.fit(
        generator(own(X), own(Y)), steps_per_epoch=2, verbose=0
    ),
    "own_order": lambda model: model.fit(
        samples().shuffle(COUNT, seed=world.RANK).repeat().batch(2), steps_per_epoch=3, verbose=0
    ),
    "parts": lambda model: model.fit(zero.shard_dataset(samples().batch(BATCH)), verbose=0),
}


def warned(fit, model):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(model)
    return [str(w.message) for w in found if "work of one" in str(w.message)]


@several_ranks
@pytest.mark.parametrize("data", world.few(SAME, "arrays dataset"))
def test_the_same_data_on_all_ranks_is_no_secret(data):
    model = dense()
    model.compile(zero.DistributedOptimizer("sgd"), loss="mse")
    said = warned(SAME[data], model)
    assert len(said) == (world.RANK == 0)
    assert all("zero.shard_dataset(" in words for words in said)
    assert not warned(SAME[data], model)  # once is enough


@several_ranks
@pytest.mark.parametrize("data", world.few(OTHER, "own_shard parts"))
def test_data_of_ones_own_needs_no_advice(data):
    model = dense()
    model.compile(zero.DistributedOptimizer("sgd"), loss="mse")
    assert not warned(OTHER[data], model)
