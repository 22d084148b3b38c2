"""`model.fit` and its relatives."""

import itertools

import horovod.tensorflow as hvd
import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero


def adam():
    return keras.optimizers.Adam(0.01)


def compiled(model=None, optimizer=None, **options):
    model = model or world.make_model()
    optimizer = zero.DistributedOptimizer(optimizer or adam())
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model, optimizer


def dataset():
    """This rank's batches, one per step."""
    parts = [world.batch(s) for s in range(world.STEPS)]
    x, y = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(world.PER_RANK)


@pytest.fixture(scope="module")
def expected():
    return world.plain(adam)


WAYS = {
    "graph": {},
    "steps_per_execution": {"steps_per_execution": 2},
    "eager": {"run_eagerly": True},
}


@pytest.mark.parametrize("way", world.few(WAYS, "graph"))
def test_fit(way, expected):
    model, optimizer = compiled(**WAYS[way])
    model.fit(dataset(), verbose=0)
    # Keras and the oracle compute the loss by different operations.
    world.assert_same(world.weights(model), expected, bitwise=False, tolerance=1e-5)
    world.assert_ranks_agree(world.weights(model))
    assert int(optimizer.iterations) == world.STEPS


@world.at_two_ranks
def test_train_on_batch_evaluate_predict(expected):
    model, _ = compiled()
    for step in range(world.STEPS):
        model.train_on_batch(*world.batch(step))
    world.assert_same(world.weights(model), expected, bitwise=False, tolerance=1e-5)
    x, y = world.union(0)
    loss = model.evaluate(x, y, verbose=0)
    assert np.isclose(loss, np.mean((model.predict(x, verbose=0) - y) ** 2), rtol=1e-5)


def test_one_trace_and_no_drift_on_a_dataset_of_unknown_size(monkeypatch):
    model, optimizer = compiled()
    optimizer.build(model.trainable_variables)
    traces = []
    run = optimizer.step.run
    monkeypatch.setattr(optimizer.step, "run", lambda *a: (traces.append(1), run(*a)))

    def generate():
        yield from (world.batch(s) for s in range(world.STEPS))

    spec = (tf.TensorSpec([None, 7]), tf.TensorSpec([None, 1]))
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    model.fit(data, epochs=3, verbose=0)
    assert int(optimizer.iterations) == 3 * world.STEPS
    assert int(optimizer.step.wire.step) == 3 * world.STEPS
    assert len(traces) == 1


def test_initial_weights_are_those_of_rank_0():
    model = world.make_model(seed=world.RANK)
    model.add(keras.layers.BatchNormalization())
    model.layers[-1].moving_mean.assign([float(world.RANK)])
    model, optimizer = compiled(model)
    optimizer.build(model.trainable_variables)
    world.assert_ranks_agree([v.numpy() for v in model.weights])
    assert model.layers[-1].moving_mean.numpy() == [0.0]


@world.at_two_ranks
def test_weights_loaded_later_are_broadcast():
    model, optimizer = compiled()
    optimizer.build(model.trainable_variables)
    for variable in model.trainable_variables:
        variable.assign(variable + float(world.RANK))
    model.fit(dataset(), verbose=0, callbacks=[zero.callbacks.BroadcastWeights()])
    world.assert_ranks_agree(world.weights(model))


@world.at_two_ranks
def test_learning_rate_callbacks():
    model, optimizer = compiled()
    warmup = zero.callbacks.LearningRateWarmup(0.01, warmup_epochs=1)
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda b, logs: seen.append(float(optimizer.learning_rate))
    )
    schedule = keras.callbacks.LearningRateScheduler(lambda e, lr: 0.002 if e == 2 else lr)
    model.fit(dataset(), epochs=3, verbose=0, callbacks=[warmup, schedule, watch])
    assert np.isclose(seen[0], 0.01 / world.SIZE)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(seen[: world.STEPS + 1]))
    assert np.isclose(seen[world.STEPS], 0.01) and np.isclose(seen[-1], 0.002)


@world.at_two_ranks
def test_metrics_are_averaged_before_other_callbacks_see_them():
    model, optimizer = compiled()
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1e9, factor=0.5)
    history = model.fit(
        dataset(), epochs=2, verbose=0, callbacks=[zero.callbacks.MetricAverage(), plateau]
    )
    world.assert_ranks_agree([np.float64(v) for v in history.history["loss"]])
    assert float(optimizer.learning_rate) < 0.01


@world.at_two_ranks
def test_moving_averages_are_swapped_for_validation():
    results = []
    for distributed in (False, True):
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        model = world.make_model()
        data = tf.data.Dataset.from_tensor_slices((world.X, world.Y)).batch(4 * world.SIZE)
        if distributed:
            model, _ = compiled(model, optimizer)
        else:
            model.compile(optimizer=optimizer, loss="mse")
        history = model.fit(
            zero.shard_dataset(data) if distributed else data, epochs=2, verbose=0,
            validation_data=(world.X, world.Y),
            callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
        )  # fmt: skip
        results.append([*world.weights(model), np.array(history.history["val_loss"])])
    world.assert_same(results[1], results[0], bitwise=False, tolerance=2e-6)


@world.at_two_ranks
def test_backups_without_the_state_are_no_secret(tmp_path):
    model, _ = compiled()
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.warns(UserWarning, match=r"zero\.callbacks\.Checkpoint"):
        model.fit(dataset(), verbose=0, callbacks=[backup])


@world.at_two_ranks
def test_xla_is_switched_off(capsys):
    model, _ = compiled(jit_compile=True)
    assert not model.jit_compile
    assert capsys.readouterr().out.count("jit_compile is off") == (hvd.rank() == 0)

    @tf.function(jit_compile=True)
    def step(x):
        model.optimizer.apply([x] * 4, model.trainable_variables)

    with pytest.raises(ValueError, match="jit_compile=False"):
        step(tf.ones([1]))


@world.at_two_ranks
def test_zeroify(expected):
    model = world.make_model()
    model.compile(optimizer=adam(), loss="mse")
    model, optimizer = zero.zeroify(model, stage=1)
    assert model.optimizer is optimizer and optimizer.config.stage == 1
    model.fit(dataset(), verbose=0)
    world.assert_same(world.weights(model), expected, bitwise=False, tolerance=1e-5)


@world.at_two_ranks
def test_progress_bar_on_rank_0_only(capsys):
    model, _ = compiled()
    model.fit(dataset(), epochs=1)
    assert bool(capsys.readouterr().out) == (world.RANK == 0)
    assert zero.verbose() == ("auto" if world.RANK == 0 else 0)


RESTS = {"nothing": 0, "one_sample": 1, "one_each_and_one": world.SIZE + 1}


@pytest.mark.parametrize("rest", world.few(RESTS, "one_sample"))
def test_uneven_datasets_train_as_one_process_would(rest):
    """The last batch is smaller, down to one sample for all ranks."""
    count = 2 * world.SIZE * 2 + RESTS[rest]
    data = tf.data.Dataset.from_tensor_slices((world.X[:count], world.Y[:count]))
    data = data.shuffle(64, seed=3).batch(2 * world.SIZE)
    alone = world.make_model()
    alone.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    alone.fit(data, epochs=2, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((world.X[:count], world.Y[:count]))
    data = data.shuffle(64, seed=3).batch(2 * world.SIZE)
    model, optimizer = compiled(optimizer=keras.optimizers.SGD(0.1))
    model.fit(zero.shard_dataset(data, check=False), epochs=2, verbose=0)
    world.assert_same(world.weights(model), world.weights(alone), bitwise=False, tolerance=2e-6)
    assert int(optimizer.iterations) == int(alone.optimizer.iterations)


def test_datasets_in_different_orders_are_refused():
    data = tf.data.Dataset.from_tensor_slices((world.X + world.RANK, world.Y)).batch(4)
    if world.SIZE == 1:
        zero.shard_dataset(data)
        return
    with pytest.raises(ValueError, match="seed"):
        zero.shard_dataset(data)


def test_metrics_count_by_samples():
    """Rank r has 2 (r + 1) samples to train on and r + 1 to validate."""
    model, _ = compiled(optimizer=keras.optimizers.SGD(0.0), metrics=["mae"])
    x, y = (a[: 2 * (world.RANK + 1)] for a in (world.X, world.Y))
    history = model.fit(
        x, y, batch_size=len(x), verbose=0, epochs=2, shuffle=False,
        validation_data=(x[: world.RANK + 1], y[: world.RANK + 1]),
        callbacks=[zero.callbacks.MetricAverage()],
    )  # fmt: skip
    predicted = model.predict(world.X, verbose=0)
    for prefix, each in (("", 2), ("val_", 1)):
        counts = [each * (r + 1) for r in range(world.SIZE)]
        error = np.concatenate([(predicted - world.Y)[:n] for n in counts])
        got = history.history
        np.testing.assert_allclose(got[f"{prefix}loss"], np.mean(error**2), rtol=1e-5)
        np.testing.assert_allclose(got[f"{prefix}mae"], np.mean(np.abs(error)), rtol=1e-5)


@pytest.mark.parametrize("stage", world.few("012", "1"))
def test_weights_of_accumulated_batches(stage):
    """Each of the batches that are added up is a union of its own, as in plain Keras."""
    counts = [[r + 1, 2 * (world.SIZE - r)] for r in range(world.SIZE)]
    results = []
    for distributed in (False, True):
        model = world.make_model()
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        if distributed:
            optimizer = zero.DistributedOptimizer(optimizer, stage=int(stage))
        optimizer.build(model.trainable_variables)
        for step in range(4):
            own = [c[step % 2] for c in counts]
            start = sum(own[: world.RANK])
            cut = slice(start, start + own[world.RANK]) if distributed else slice(sum(own))
            x, y = world.X[cut], world.Y[cut]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            if distributed:
                zero.weight(len(x))
            optimizer.apply(grads, model.trainable_variables)
        results.append(world.weights(model))
    world.assert_same(results[1], results[0], bitwise=False, tolerance=2e-6)


def test_weighted_ranks_equal_the_union():
    """Rank r has r + 1 samples of the batch."""
    counts = [r + 1 for r in range(world.SIZE)]
    start, total = sum(counts[: world.RANK]), sum(counts)
    x, y = world.X[:total], world.Y[:total]
    own = slice(start, start + counts[world.RANK])
    results = []
    for distributed in (False, True):
        model = world.make_model()
        optimizer = keras.optimizers.SGD(0.1)
        if distributed:
            optimizer = zero.DistributedOptimizer(optimizer)
        bx, by = (x[own], y[own]) if distributed else (x, y)

        @tf.function
        def step(bx, by, model=model, optimizer=optimizer, distributed=distributed):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(bx) - by) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            if distributed:
                zero.weight(tf.shape(bx)[0])
            optimizer.apply(grads, model.trainable_variables)

        for _ in range(3):
            step(tf.constant(bx), tf.constant(by))
        results.append(world.weights(model))
    world.assert_same(results[1], results[0], bitwise=False, tolerance=2e-6)


ANEW = {
    "forced": lambda model: model.make_train_function(force=True),
    "set to None": lambda model: setattr(model, "train_function", None),
}


@world.at_two_ranks
@pytest.mark.parametrize("way", ANEW)
def test_a_train_function_made_anew_sees_what_was_set_since(way):
    def trained(optimizer, share):
        model = world.make_model()
        model.compile(optimizer=optimizer, loss="mse")
        x, y = (np.concatenate(p) for p in zip(*map(world.batch, range(2)), strict=True))
        x, y = (hvd.broadcast(tf.constant(a), 0).numpy()[:-1] for a in (x, y))
        data = share(tf.data.Dataset.from_tensor_slices((x, y)).batch(world.PER_RANK))
        model.fit(data, verbose=0)
        optimizer.momentum = 0.1
        ANEW[way](model)
        model.fit(data, verbose=0)
        return world.weights(model)

    plain = trained(keras.optimizers.SGD(0.1, momentum=0.9), lambda data: data)
    optimizer = zero.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    ours = trained(optimizer, zero.shard_dataset)
    world.assert_same(ours, plain, bitwise=False, tolerance=1e-5)
