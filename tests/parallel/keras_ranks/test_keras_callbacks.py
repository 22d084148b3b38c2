"""Callbacks as they are written for one process, or for Horovod."""

import importlib.util
import json
import time

import horovod.tensorflow as hvd
import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero

several_ranks = pytest.mark.skipif(world.SIZE == 1, reason="needs two ranks")


def compiled(optimizer=None, stage=2, **options):
    model = world.make_model()
    optimizer = zero.DistributedOptimizer(optimizer or keras.optimizers.Adam(0.01), stage=stage)
    if stage == 3:
        zero.zeroify(model, optimizer, units=keras.layers.Dense, persist_below=1)
    model.compile(optimizer, loss="mse", **options)
    return model


def fit(model, callbacks=(), **options):
    parts = [world.batch(s) for s in range(world.STEPS)]
    x, y = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    options = {"batch_size": world.PER_RANK, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, callbacks=list(callbacks), **options)


def on_rank_0(*callbacks):
    return callbacks if world.RANK == 0 else ()


# -- keras.callbacks.ModelCheckpoint ---------------------------------------------------------------


@pytest.mark.parametrize("policy", world.few(["float32", "mixed_float16"], "float32"))
def test_model_checkpoint_on_rank_0_saves_the_whole_model(shared_folder, policy):
    keras.config.set_dtype_policy(policy)
    try:
        path = shared_folder / "model-{epoch}.keras"
        model = compiled()
        fit(model, on_rank_0(keras.callbacks.ModelCheckpoint(path)), epochs=2)
        plain = zero.plain_optimizer(getattr(model.optimizer, "inner_optimizer", model.optimizer)
                                     if policy != "float32" else model.optimizer)  # fmt: skip
        hvd.allreduce(tf.zeros([1]), name="written")
        loaded = keras.models.load_model(shared_folder / "model-2.keras")
        world.assert_same(world.weights(loaded), world.weights(model))
        found = zero.plain_optimizer(
            loaded.optimizer.inner_optimizer if policy != "float32" else loaded.optimizer
        )
        if world.RANK == 0:
            for got, expected in zip(found.variables, plain.variables, strict=True):
                np.testing.assert_array_equal(got.numpy(), expected.numpy())
        fit(loaded)
        world.assert_ranks_agree(world.weights(loaded))
    finally:
        keras.config.set_dtype_policy("float32")


@several_ranks
def test_the_best_model_may_be_that_of_rank_0s_numbers(shared_folder):
    """Not every epoch is saved, and only one rank knows which."""
    best = keras.callbacks.ModelCheckpoint(
        shared_folder / "best.keras", monitor="loss", mode="max", save_best_only=True
    )
    model = compiled()
    fit(model, on_rank_0(best), epochs=3)
    world.assert_ranks_agree(world.weights(model))
    assert model.optimizer.saved_state is None
    if world.RANK == 0:
        assert (shared_folder / "best.keras").exists()


REFUSED = {
    "hdf5": ({"filepath": "model.h5"}, True, r"HDF5.*zero\.callbacks\.Checkpoint"),
    "between_epochs": ({"filepath": "m.keras", "save_freq": 2}, True, r"folder, every="),
    "all_ranks": ({"filepath": "m.keras"}, False, r"ranks \[0, 1.*same file"),
}


@several_ranks
@pytest.mark.parametrize("case", world.few(REFUSED, "hdf5"))
def test_model_checkpoints_that_cannot_be_are_refused_on_all_ranks(case):
    options, only_first, words = REFUSED[case]
    checkpoint = keras.callbacks.ModelCheckpoint(**options)
    with pytest.raises(zero.ShardedStateError, match=words):
        fit(compiled(), on_rank_0(checkpoint) if only_first else [checkpoint])


# -- callbacks that decide -------------------------------------------------------------------------


class Decide(keras.callbacks.Callback):
    """As a callback that looks at this rank's metrics."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_epoch_end(self, epoch, logs=None):
        if self.how == "stop" and epoch == world.RANK:
            self.model.stop_training = True
        if self.how == "rate" and world.RANK == world.SIZE - 1:
            self.model.optimizer.learning_rate = 1e-5


@several_ranks
@pytest.mark.parametrize(
    ("how", "words"),
    [("stop", "stop_training is True on rank 0"), ("rate", "learning rate is 0.0")],
)
def test_ranks_that_decide_differently_are_told(how, words):
    with pytest.raises(zero.DisagreementError, match=rf"{words}.*MetricAverage\(\)"):
        fit(compiled(), [Decide(how)], epochs=3)


@world.at_two_ranks
def test_early_stopping_on_averaged_metrics_stops_all_ranks():
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
    history = fit(compiled(), [zero.callbacks.MetricAverage(), stop], epochs=5)
    assert len(history.history["loss"]) == 2


class StopAt(keras.callbacks.Callback):
    """Stops some ranks after a step of the first epoch."""

    def __init__(self, step, ranks):
        super().__init__()
        self.step, self.ranks = step, ranks

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.step and world.RANK in self.ranks:
            self.model.stop_training = True


@several_ranks
def test_ranks_that_are_stopped_in_the_same_step_end_there():
    everybody, last = range(world.SIZE), world.STEPS - 1
    for stop, steps in ((StopAt(1, everybody), 2), (StopAt(last, [1]), world.STEPS)):
        model = compiled()
        fit(model, [zero.callbacks.MetricAverage(), stop], epochs=3)
        assert int(model.optimizer.iterations) == steps
        world.assert_ranks_agree(world.weights(model))


@several_ranks
@pytest.mark.parametrize("stage", world.few(["0", "2", "3"], "2"))
def test_a_rank_that_stops_in_the_middle_of_an_epoch_is_an_error_at_once(stage):
    model, began = compiled(stage=int(stage)), time.monotonic()
    with pytest.raises(zero.DisagreementError, match=r"has ended (an|its) epoch.*stop_training"):
        fit(
            model,
            [zero.callbacks.MetricAverage(), StopAt(1, [0])],
            validation_data=(world.X, world.Y),
        )
    assert time.monotonic() - began < 60


@several_ranks
def test_a_rank_with_fewer_batches_than_it_could_know_is_an_error_at_once():
    short = world.STEPS - (world.RANK == world.SIZE - 1)
    data = tf.data.Dataset.from_generator(
        lambda: (world.batch(s) for s in range(short)),
        output_signature=tuple(tf.TensorSpec((None, n), tf.float32) for n in (7, 1)),
    )
    with pytest.raises(zero.DisagreementError, match=r"has ended (an|its) epoch.*equally many"):
        compiled().fit(data, epochs=2, verbose=0)


# -- Horovod's callbacks ---------------------------------------------------------------------------


@world.at_two_ranks
def test_horovods_callbacks_are_refused_with_the_line_to_write():
    from horovod.tensorflow.keras import callbacks

    for callback in (callbacks.MetricAverageCallback(), callbacks.LearningRateWarmupCallback(0.1)):
        words = rf"zero\.callbacks\.{type(callback).__name__}.*import zerohvd\.keras as hvd"
        with pytest.raises(TypeError, match=words):
            fit(compiled(), [callback])


@world.at_two_ranks
def test_horovods_names_and_arguments():
    model = compiled(keras.optimizers.SGD(0.1, momentum=0.9))
    rates = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda b, logs: rates.append(float(model.optimizer.learning_rate))
    )
    callbacks = [
        zero.callbacks.BroadcastGlobalVariablesCallback(root_rank=1),
        zero.callbacks.MetricAverageCallback(device=""),
        zero.callbacks.LearningRateWarmupCallback(
            initial_lr=0.1, warmup_epochs=1, momentum_correction=False, steps_per_epoch=world.STEPS
        ),
        zero.callbacks.LearningRateScheduleCallback(
            0.1, multiplier=0.1, start_epoch=2, end_epoch=4, momentum_correction=False
        ),
        zero.callbacks.LearningRateScheduleCallback(
            0.1, lambda e: 1 / (1 + e), start_epoch=4, staircase=False, momentum_correction=False
        ),
        watch,
    ]
    fit(model, callbacks, epochs=5)
    by_epoch = np.array(rates).reshape(5, world.STEPS)
    steps = np.arange(world.STEPS) / world.STEPS
    np.testing.assert_allclose(by_epoch[0], 0.1 * (1 + steps) / 2, rtol=1e-6)
    np.testing.assert_allclose(by_epoch[1:4, 0], [0.1, 0.1, 0.01], rtol=1e-6)
    np.testing.assert_allclose(by_epoch[4], 0.1 / (5 + steps), rtol=1e-6)
    world.assert_ranks_agree(world.weights(model))


@world.at_two_ranks
def test_weights_of_another_rank_need_a_built_model():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(zero.DistributedOptimizer("sgd"), loss="mse")
    with pytest.raises(ValueError, match="build it before fit"):
        fit(model, [zero.callbacks.BroadcastGlobalVariablesCallback(1)])


@world.at_two_ranks
def test_momentum_correction_is_not_passed_over_in_silence():
    model = compiled(keras.optimizers.SGD(0.1, momentum=0.9))
    warmup = zero.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1)
    if world.RANK == 0:
        with pytest.warns(UserWarning, match="momentum_correction=False"):
            fit(model, [warmup])
    else:
        fit(model, [warmup])


# -- what callbacks read ---------------------------------------------------------------------------


class Reader(keras.callbacks.Callback):
    """Reads and sets all that an optimizer has, in every hook."""

    def look(self, *_, **__):
        optimizer = self.model.optimizer
        rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        optimizer.learning_rate = rate
        optimizer.learning_rate.assign(rate)
        assert int(optimizer.iterations) >= 0
        assert json.loads(json.dumps(optimizer.get_config()))["stage"] == 2
        assert [np.shape(v.numpy()) == tuple(v.shape) for v in optimizer.variables]
        assert optimizer.name and repr(optimizer)


for _hook in [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]:
    setattr(Reader, _hook, Reader.look)


@pytest.mark.parametrize("eagerly", world.few([False, True], ""))
def test_callbacks_may_read_the_optimizer_in_every_hook(eagerly):
    data = {"validation_data": (world.X, world.Y)}
    plain, watched = (compiled(run_eagerly=eagerly) for _ in range(2))
    fit(plain, epochs=2, **data)
    fit(watched, [Reader()], epochs=2, **data)
    watched.predict(world.X, callbacks=[Reader()], verbose=0)
    world.assert_same(world.weights(watched), world.weights(plain))


@world.at_two_ranks
def test_schedulers_and_loggers_of_keras(tmp_path):
    callbacks = [
        zero.callbacks.MetricAverage(),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1e9, factor=0.5),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.TerminateOnNaN(),
    ]
    model = compiled()
    fit(model, callbacks, epochs=3)
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.01 / 2**5, rtol=1e-6)


@world.at_two_ranks
@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="needs tensorboard")
def test_tensorboard(tmp_path):
    model = compiled()
    board = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1, update_freq=1)
    fit(model, [board], epochs=2, validation_data=(world.X, world.Y))
    assert list(tmp_path.glob("train/events*")) and list(tmp_path.glob("validation/events*"))


# -- models that are taken elsewhere ---------------------------------------------------------------


@world.at_two_ranks
@pytest.mark.parametrize("built", [True, False])
def test_trained_models_are_exported_by_any_rank(tmp_path, built):
    """Inference needs no optimizer: nothing is collected, so one rank alone may do it."""
    if built:
        model = compiled(keras.optimizers.Adam(0.01, use_ema=True))
    else:
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(zero.DistributedOptimizer("adam"), loss="mse")
    fit(model)
    if world.RANK == 0:
        model.export(tmp_path / "exported", verbose=False)
        tf.saved_model.save(model, str(tmp_path / "saved"))
        served = tf.saved_model.load(str(tmp_path / "exported"))
        np.testing.assert_allclose(
            served.serve(world.X), model.predict(world.X, verbose=0), rtol=1e-5, atol=1e-6
        )
    fit(model)
    world.assert_ranks_agree(world.weights(model))
