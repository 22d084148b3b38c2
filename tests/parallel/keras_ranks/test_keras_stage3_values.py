"""Stage 3 in Keras: reading, writing, saving and loading sharded variables."""

import keras
import keras_world as world
import numpy as np
import pytest
import stage3_world as stage3
import tensorflow as tf

import zerohvd.keras as zero

RANKS = (2, 3)  # every test traces graphs


def mlp(seed=7):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((7,)),
            keras.layers.Dense(33, activation="tanh", name="first"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1, name="last"),
        ]
    )


def sharded(model=None, **options):
    options = {"stage": 3, "persist_below": 0, **options}
    model, opt = zero.zeroify(model or mlp(), keras.optimizers.Adam(0.01), **options)
    model.compile(optimizer=opt, loss="mse")
    return model, opt


def train(model, steps=range(2)):
    for s in steps:
        model.train_on_batch(*world.batch(s))


def whole(model):
    with zero.gathered(model):
        return [v.numpy() for v in model.weights]


def assert_equal(got, expected):
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_array_equal(g, e)


needs_ranks = pytest.mark.skipif(world.SIZE == 1, reason="one rank holds everything")


@needs_ranks
def test_reading_or_writing_a_sharded_variable_raises_and_names_it(tmp_path):
    model, _ = sharded()
    layer = model.layers[0]
    for mistake in (
        lambda: layer.kernel.numpy(),
        lambda: layer.get_weights(),
        lambda: layer.set_weights([np.zeros((7, 33)), np.zeros(33)]),
        lambda: layer.kernel.assign(np.zeros((7, 33))),
        lambda: layer.kernel + 1.0,
        lambda: keras.ops.convert_to_numpy(layer.kernel),
    ):
        with pytest.raises(zero.ShardedStateError, match=r"first/kernel.*zero\.gathered"):
            mistake()
    for path, save in (("a.keras", model.save), ("a.weights.h5", model.save_weights)):
        with pytest.raises(zero.ShardedStateError, match=r"zero.save_model\(model, path\)"):
            save(tmp_path / path)
        assert not (tmp_path / path).exists()
    assert "sharded" in repr(layer.kernel)


def test_the_summary_knows_the_whole_shapes():
    model, _ = sharded()
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    assert "264" in "".join(lines) and model.count_params() == 7 * 33 + 33 + 33 + 1


def test_gathered_reads_and_writes():
    model, _ = sharded()
    plain = mlp()
    assert_equal(whole(model), [v.numpy() for v in plain.weights])
    values = [np.full((7, 33), 2.0, "float32"), np.arange(33, dtype="float32")]
    with zero.gathered(model.layers[0], writable=True):
        if world.RANK == 0:
            model.layers[0].set_weights(values)
    assert_equal(whole(model)[:2], values)
    with pytest.raises(zero.ShardedStateError, match="writable=True"), zero.gathered(model):
        for v in model.weights:
            v.assign(v + 1.0)
    assert_equal(whole(model)[:2], values)
    with pytest.raises(TypeError, match="a layer, a variable or several"), zero.gathered(3):
        pass


@pytest.mark.parametrize("path", world.few(["m.keras", "m.weights.h5"], "m.keras"))
def test_a_whole_model_is_written_by_one_rank_with_the_help_of_all(shared_folder, path):
    model, _ = sharded()
    train(model)
    expected = whole(model)
    zero.save_model(model, shared_folder / path)
    if path.endswith(".keras"):
        plain = keras.models.load_model(shared_folder / path, compile=False)
    else:
        plain = mlp(seed=1)
        plain.load_weights(shared_folder / path)
    assert_equal([v.numpy() for v in plain.weights], expected)
    other, _ = sharded(mlp(seed=2))
    zero.load(shared_folder / path, other)
    assert_equal(whole(other), expected)


@pytest.mark.parametrize("stages", [(3, 2), (2, 3), (3, 3)])
def test_checkpoints_are_those_of_all_stages(shared_folder, stages):
    first, second = stages

    def make(stage, seed):
        model, opt = zero.zeroify(
            mlp(seed), keras.optimizers.Adam(0.01), stage=stage,
            **({"persist_below": 0} if stage == 3 else {}),
        )
        model.compile(optimizer=opt, loss="mse")
        return model

    model = make(first, 7)
    train(model)
    zero.save(shared_folder / "c", model, extra={"epoch": 3})
    train(model, range(2, 4))
    other = make(second, 8)
    assert zero.load(shared_folder / "c", other) == {"epoch": 3}
    train(other, range(2, 4))
    for g, e in zip(whole(other), whole(model), strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)
    assert int(other.optimizer.iterations) == 4


def test_frozen_weights_are_sharded_stored_and_loaded(shared_folder):
    def frozen(seed):
        model = mlp(seed)
        model.get_layer("first").trainable = False
        return model

    model, opt = sharded(frozen(7))
    before = whole(model)
    assert len(opt.step.variables) == 2
    train(model)
    after = whole(model)
    assert_equal([v for v in after if v.shape in ((7, 33), (33,))],
                 [v for v in before if v.shape in ((7, 33), (33,))])
    zero.save(shared_folder / "c", model)
    other, _ = sharded(frozen(8))
    zero.load(shared_folder / "c", other)
    assert_equal(whole(other), after)


def test_the_callback_resumes(shared_folder):
    def run(epochs):
        model, _ = sharded()
        data = zero.shard_dataset(stage3.data(stage3.X, stage3.Y))
        model.fit(data, epochs=epochs, verbose=0,
                  callbacks=[zero.callbacks.Checkpoint(shared_folder / "run")])
        return model

    run(1)
    model = run(2)
    assert int(model.optimizer.iterations) == 2 * stage3.STEPS


def test_a_deferred_model_has_no_memory_and_the_values_of_a_plain_one():
    def make():
        keras.utils.set_random_seed(11)
        return keras.Sequential(
            [
                keras.layers.Input((64,)),
                keras.layers.Dense(128, activation="tanh"),
                keras.layers.Dense(65, kernel_initializer="orthogonal"),
                keras.layers.Dense(3),
            ]
        )

    plain = make()
    with zero.deferred_init():
        model = make()
    large = [v for v in model.weights if np.prod(v.shape) >= 4096]
    assert len(large) == 2
    assert [zero_memory(v) for v in large] == [True, True]
    model, _ = zero.zeroify(model, keras.optimizers.Adam(0.01), stage=3)
    assert_equal(whole(model), [v.numpy() for v in plain.weights])
    # Somebody who reads a variable gives it its memory.
    with zero.deferred_init():
        model = make()
    x = np.ones((2, 64), "float32")
    np.testing.assert_allclose(model(x), plain(x), rtol=1e-6)
    assert type(model.layers[0].kernel) is keras.Variable


class Attending(keras.layers.Layer):
    """Without build(): its sublayers are built when Keras calls it with symbols."""

    def __init__(self):
        super().__init__()
        self.attend = keras.layers.MultiHeadAttention(4, 16)
        self.dense = keras.layers.Dense(64)

    def call(self, x):
        return self.dense(x + self.attend(x, x))


def test_layers_that_are_built_in_a_symbolic_call_are_deferred_and_trained_on_unknown_batches():
    def make():
        keras.utils.set_random_seed(12)
        inputs = keras.layers.Input((8, 64))
        return keras.Model(inputs, Attending()(Attending()(inputs)))

    plain = make()
    with zero.deferred_init():
        model = make()
    assert sum(zero_memory(v) for v in model.weights) == 2 * 5
    model, opt = zero.zeroify(model, keras.optimizers.SGD(0.1), stage=3)
    assert_equal(whole(model), [v.numpy() for v in plain.weights])
    x = np.random.default_rng(0).normal(size=(12, 8, 64)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[::-1])).batch(12)  # of unknown size
    model.compile(optimizer=opt, loss="mse")
    model.fit(zero.shard_dataset(data), epochs=2, verbose=0)
    plain.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    plain.fit(data, epochs=2, verbose=0)
    for ours, expected in zip(whole(model), plain.weights, strict=True):
        np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_rank_draws_its_own_part_of_the_values_of_a_plain_model(dtype):
    names = ["uniform", "normal", "truncated_normal", "glorot_normal", "he_uniform", "ones"]
    own = [keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=3)]

    def make():
        keras.utils.set_random_seed(11)
        inner = [
            keras.layers.Dense(67, kernel_initializer=i, dtype=dtype) for i in (*names, *own)
        ]
        convolution = keras.layers.Conv1D(64, 3, dtype=dtype)
        table = keras.layers.Embedding(5000, 67, dtype=dtype)
        return keras.Sequential([keras.layers.Input((9,)), table, *inner, convolution])

    plain = make()
    with zero.deferred_init():
        model = make()
    if world.RANK:  # another seed would draw other values: rank 0's counts
        for layer in model.layers:
            getattr(layer, "kernel_initializer", layer).seed = 99
    model, opt = zero.zeroify(model, keras.optimizers.SGD(0.01), stage=3)
    assert any(u.table is not None for u in opt.sharded.units.all)
    assert_equal(whole(model), [v.numpy() for v in plain.weights])


def zero_memory(variable):
    return type(variable).__name__ == "DeferredVariable"


def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(ValueError, match="needs a built model"):
        zero.zeroify(keras.Sequential([keras.layers.Dense(3)]), "adam", stage=3)
    other = mlp()
    with pytest.raises(ValueError, match=r"zero\.zeroify"):
        zero.DistributedOptimizer("adam", stage=3).build(other.trainable_variables)
    with pytest.raises(ValueError, match="needs stage=3"):
        zero.zeroify(other, "adam", stage=2, units=keras.layers.Dense)
    with pytest.raises(TypeError, match="recompute"):
        zero.zeroify(other, "adam", stage=3, recompute=3)
    with pytest.raises(ValueError, match="matches no layer"):
        zero.zeroify(other, "adam", stage=3, units=keras.layers.Conv2D)


@world.at_two_ranks
def test_a_gradient_of_another_shape_is_refused():
    model, opt = sharded()
    grads = [tf.zeros(v.shape) for v in model.trainable_variables]
    with pytest.raises(ValueError, match=r"first/kernel.*tape\.gradient"):
        opt.apply(grads, model.trainable_variables)
