"""What ranks hold and move, what is saved, and what is refused."""

import copy
import functools
import pickle

import horovod.tensorflow as hvd
import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero
from zerohvd.communication.collectives import HorovodCollectives
from zerohvd.keras.communication import arrays


def trained(inner, model=None, stage=2, **options):
    model = model or world.make_model()
    optimizer = zero.DistributedOptimizer(inner, stage=stage, **options)
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(*world.batch(0), batch_size=world.PER_RANK, epochs=2, verbose=0)
    return model, optimizer


def wide_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.layers.Input((7,)), keras.layers.Dense(4096), keras.layers.Dense(1)]
    )


@functools.cache
def trained_wide_model(stage):
    return trained(keras.optimizers.Adam(0.01), wide_model(), stage)


@pytest.mark.parametrize("stage", world.few("02", "2"))
def test_memory_per_rank(stage):
    stage = int(stage)
    model, optimizer = trained_wide_model(stage)
    numel = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    report = zero.memory_report(model)
    ranks = world.SIZE if stage else 1
    assert report["params"] == 4 * numel
    assert report["master"] == report["grads"] == 0
    assert abs(report["optimizer"] - 8 * numel / ranks) <= 0.02 * 8 * numel / ranks
    slots = [v for v in optimizer.variables if len(v.shape)]
    assert sum(int(np.prod(v.shape)) for v in slots) == 2 * sum(
        p.piece.param_span.length for p in optimizer.step.pieces
    )


def test_communication_per_step():
    model, optimizer = trained_wide_model(2)
    report = zero.communication_report(optimizer)
    if world.SIZE == 1:
        assert report["total"].bytes == 0
        return
    padded = sum(b.padded for b in optimizer.step.layout.buckets)
    share = 4 * padded * (world.SIZE - 1) // world.SIZE
    count = len(optimizer.step.layout.buckets)
    assert report["reducescatter"] == (count, share)
    assert report["allgather"] == (count, share)
    assert report["total"].bytes == 2 * share
    numel = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert padded - numel <= 0.02 * numel


@pytest.mark.parametrize("name", world.few(["AdamW", "Nadam", "Lamb", "Adafactor"], "Nadam Lamb"))
def test_saved_models_hold_the_state_of_all_ranks(name, tmp_path_factory):
    path = _shared_path(tmp_path_factory)
    model, _ = trained(getattr(keras.optimizers, name)(learning_rate=0.01))
    zero.save_model(model, path)
    again = keras.models.load_model(path)
    assert isinstance(again.optimizer, zero.DistributedOptimizer)
    x, y = world.batch(1)
    for m in (model, again):
        m.fit(x, y, batch_size=world.PER_RANK, epochs=2, verbose=0)
    world.assert_same(world.weights(again), world.weights(model), bitwise=True)
    assert int(again.optimizer.iterations) == 4


@world.at_two_ranks
def test_one_rank_loads_a_model_to_look_at_it(tmp_path_factory, tmp_path):
    path = _shared_path(tmp_path_factory)
    model, optimizer = trained(keras.optimizers.Adam(0.01))
    zero.save_model(model, path)
    if world.RANK == 1:
        again = keras.models.load_model(path)
        x, y = world.batch(1)
        assert again.evaluate(x, y, verbose=0) == model.evaluate(x, y, verbose=0)
        assert int(again.optimizer.iterations) == int(optimizer.iterations)
        again.save(tmp_path / "copy.keras")  # it has the whole state still
        copy = keras.models.load_model(tmp_path / "copy.keras")
        assert copy.optimizer.loaded_state.keys() == again.optimizer.loaded_state.keys()
    both = keras.models.load_model(path)
    if world.RANK == 1:
        both.optimizer.loaded_state = None  # as if only the other rank had loaded it
    with pytest.raises(zero.DisagreementError, match="loaded from a file"):
        both.fit(*world.batch(1), batch_size=world.PER_RANK, verbose=0)


def _shared_path(factory):
    """Rank 0's folder, for all ranks."""
    ranks = HorovodCollectives(hvd, arrays)
    return ranks.broadcast_object(str(factory.mktemp("saved") / "model.keras"), name="path")


def test_model_save_refuses_to_store_a_shard(tmp_path):
    model, _ = trained(keras.optimizers.Adam(0.01))
    model.save_weights(tmp_path / "w.weights.h5")
    before = world.weights(model)
    model.fit(*world.batch(1), batch_size=world.PER_RANK, verbose=0)
    model.load_weights(tmp_path / "w.weights.h5")
    world.assert_same(world.weights(model), before)
    if world.SIZE == 1:
        model.save(tmp_path / "m.keras")
        return
    for name in ("m.keras", "m.h5"):
        (tmp_path / name).write_text("what was there")
        with pytest.raises(zero.ShardedStateError, match="save_model"):
            model.save(tmp_path / name)
        assert (tmp_path / name).read_text() == "what was there"
    with pytest.raises(zero.ShardedStateError, match="save_model"):
        keras.saving.save_model(model, tmp_path / "other.keras")
    with pytest.raises(zero.ZeroError, match=r"ends with \.keras"):
        zero.save_model(model, tmp_path / "all.h5")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.h5", "m.keras", "w.weights.h5"]
    model.save(tmp_path / "m.h5", include_optimizer=False)


WAYS_TO_COPY = {
    "checkpoint": lambda m, path: tf.train.Checkpoint(optimizer=m.optimizer).save(path),
    "write": lambda m, path: tf.train.Checkpoint(opt=m.optimizer, model=m).write(path),
    "model": lambda m, path: tf.train.Checkpoint(model=m).save(path),
    "manager": lambda m, path: tf.train.CheckpointManager(
        tf.train.Checkpoint(step=tf.Variable(1), parts=[m.optimizer]), path, 3
    ).save(),
    "pickle": lambda m, path: pickle.dumps(m.optimizer),
    "pickled model": lambda m, path: pickle.dumps(m),
    "deepcopy": lambda m, path: copy.deepcopy(m.optimizer),
    "own variables": lambda m, path: m.optimizer.save_own_variables({}),
}


@pytest.mark.parametrize("scaled", [False, True] if world.SIZE == 2 else [False])
def test_nothing_takes_a_shard_for_the_whole_state(scaled, tmp_path):
    wrap = keras.optimizers.LossScaleOptimizer if scaled else (lambda inner: inner)
    model, _ = trained(wrap(keras.optimizers.Adam(0.01)))
    for name, store in WAYS_TO_COPY.items():
        path = str(tmp_path / name.replace(" ", "_"))
        if world.SIZE == 1:
            store(model, path)
            continue
        with pytest.raises(zero.ShardedStateError, match=r"zero\.save"):
            store(model, path)
    if world.SIZE > 1:
        assert not list(tmp_path.rglob("*.index"))
    before = world.weights(model)
    weights = tf.train.Checkpoint(variables=model.variables).save(str(tmp_path / "weights"))
    model.fit(*world.batch(1), batch_size=world.PER_RANK, verbose=0)
    tf.train.Checkpoint(variables=model.variables).restore(weights).assert_consumed()
    world.assert_same(world.weights(model), before)


@world.at_two_ranks
def test_whole_states_are_copied_and_stored_by_tensorflow(tmp_path):
    """Stage 0, where every rank holds everything."""
    model, optimizer = trained(keras.optimizers.Adam(0.01), stage=0)
    state = [v.numpy() for v in optimizer.variables]
    stored = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "all"))
    model.fit(*world.batch(1), batch_size=world.PER_RANK, verbose=0)
    tf.train.Checkpoint(model=model, optimizer=optimizer).restore(stored).assert_consumed()
    for variable, value in zip(optimizer.variables, state, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@world.at_two_ranks
def test_checkpoint_callback(tmp_path_factory):
    path = _shared_path(tmp_path_factory).replace("model", "model-{epoch}")
    model = world.make_model()
    optimizer = keras.optimizers.LossScaleOptimizer(
        zero.DistributedOptimizer(keras.optimizers.Adam(0.01))
    )
    model.compile(optimizer=optimizer, loss="mse")
    saver = zero.callbacks.Checkpoint(path, monitor="loss", save_best_only=True)
    model.fit(
        *world.batch(0), batch_size=world.PER_RANK, epochs=2, verbose=0,
        callbacks=[zero.callbacks.MetricAverage(), saver],
    )  # fmt: skip
    again = keras.models.load_model(path.format(epoch=2))
    world.assert_same(world.weights(again), world.weights(model))
    assert float(again.optimizer.dynamic_scale) == float(optimizer.dynamic_scale)


def test_plain_optimizer_has_the_whole_state():
    make = keras.optimizers.Adam
    model, oracle = world.make_model(), make(0.01)
    world.loop(model, oracle, reduce=True)
    _, optimizer = world.sharded(lambda: make(0.01))
    plain = zero.plain_optimizer(optimizer)
    assert (plain is None) == (world.RANK != 0)
    if plain is not None:
        got = [np.asarray(v, "float64") for v in plain.variables]
        world.assert_same(got, [np.asarray(v, "float64") for v in oracle.variables])


@world.at_two_ranks
def test_config_round_trip():
    optimizer = zero.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.02, clipnorm=1.0)),
        stage=1,
        bucket_bytes=1 << 16,
    )
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == optimizer.get_config()
    assert again.config == optimizer.config and again.clipnorm == 1.0


def test_ranks_that_disagree_get_an_error_on_every_rank():
    if world.SIZE == 1:
        pytest.skip("needs two ranks")
    width = 4 + (world.RANK == world.SIZE - 1)
    variable = keras.Variable(np.ones(width, "float32"), name="w")
    optimizer = zero.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(zero.DisagreementError, match="disagree"):
        optimizer.build([variable])


def test_two_optimizers_in_one_step():
    """As for a GAN: their operations must not be taken for each other's, whatever the names of
    the variables, and in whatever order the optimizers were created."""
    a, b = (keras.Variable(np.ones(5, "float32"), name="same") for _ in range(2))
    made = [zero.DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1e9))
            for _ in range(2)]  # fmt: skip
    first, second = made if world.RANK % 2 else made[::-1]

    @tf.function
    def step(grad):
        first.apply([grad], [a])
        second.apply([grad * 2.0], [b])

    step(tf.fill([5], float(world.RANK)))
    mean = (world.SIZE - 1) / 2
    np.testing.assert_allclose(a.numpy(), 1 - mean, rtol=1e-6)
    np.testing.assert_allclose(b.numpy(), 1 - 2 * mean, rtol=1e-6)


def test_optimizers_built_in_another_order_are_refused():
    if world.SIZE == 1:
        pytest.skip("needs two ranks")
    a, b = (keras.Variable(np.ones(5, "float32"), name=n) for n in "ab")
    order = [a, b] if world.RANK == 0 else [b, a]
    for variable in order:
        optimizer = zero.DistributedOptimizer(keras.optimizers.SGD(1.0))
        with pytest.raises(zero.DisagreementError, match="same order"):
            optimizer.build([variable])
