"""A Keras training that is stopped and resumed goes on as if nothing had happened."""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_world import RANK, SIZE, X, Y, assert_ranks_agree, assert_same, few, make_model

import zerohvd.keras as zero
from zerohvd.checkpoint import read_manifest


def build(make_optimizer, stage=2, model=None, **options):
    model = model or make_model()
    optimizer = zero.DistributedOptimizer(make_optimizer(), stage=stage, **options)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def train(model, optimizer, first, stop):
    """Steps on data of this rank; eager, as nothing here depends on graphs."""
    for s in range(first, stop):
        rng = np.random.default_rng([s, RANK])
        x = rng.normal(size=(4, 7)).astype("float32")
        with tf.GradientTape() as tape:
            out = tf.cast(model(x, training=True), tf.float32)
            loss = optimizer.scale_loss(tf.reduce_mean((out - 1.0) ** 2))
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))


def values(model):
    return [v.numpy().astype("float32") for v in model.variables]


def same(a, b):
    for x, y in zip(values(a), values(b), strict=True):
        np.testing.assert_array_equal(x, y)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.AdamW(0.01),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=2
    ),
}


@pytest.mark.parametrize("name", few(OPTIMIZERS, "adam ema"))
def test_training_goes_on_bit_by_bit(shared_folder, name):
    model, opt = build(OPTIMIZERS[name])
    train(model, opt, 0, 4)
    zero.save(shared_folder / "a", model, opt, extra={"epoch": 3})
    train(model, opt, 4, 8)
    other, again = build(OPTIMIZERS[name], model=make_model(seed=1))
    train(other, again, 0, 1)
    assert zero.load(shared_folder / "a", other, again) == {"epoch": 3}
    assert int(again.iterations) == 4
    train(other, again, 4, 8)
    same(model, other)
    assert read_manifest(shared_folder / "a")[1].step == 4


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_any_stage_goes_on_where_another_stopped(shared_folder, before, after):
    model, opt = build(OPTIMIZERS["adam"], before, bucket_bytes=300)
    train(model, opt, 0, 3)
    zero.save(shared_folder / "a", model, opt)
    train(model, opt, 3, 6)
    partition = "flat" if before == after else "parameter"
    other, again = build(
        OPTIMIZERS["adam"], after, make_model(seed=1), bucket_bytes=1000, partition=partition
    )
    zero.load(shared_folder / "a", other, again)
    train(other, again, 3, 6)
    assert_same(values(other), values(model))
    assert_ranks_agree(values(other))


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("after", [1, 2])
def test_accumulation_in_progress_goes_on(shared_folder, before, after):
    def make():
        return keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)

    model, opt = build(make, before)
    train(model, opt, 0, 5)
    zero.save(shared_folder / "a", model, opt)
    train(model, opt, 5, 9)
    other, again = build(make, after, make_model(seed=1))
    zero.load(shared_folder / "a", other, again)
    train(other, again, 5, 9)
    assert_same(values(other), values(model), bitwise=before == after, tolerance=1e-5)


def test_16_bit_variables_and_their_masters(shared_folder):
    def model(dtype="bfloat16", seed=7):
        return make_model(seed, dtype=keras.dtype_policies.DTypePolicy(dtype))

    first, opt = build(OPTIMIZERS["adam"], model=model())
    train(first, opt, 0, 3)
    zero.save(shared_folder / "a", first, opt)
    masters = np.concatenate([p.master.numpy().reshape(-1) for p in opt.step.pieces] or [X[0]])
    train(first, opt, 3, 6)
    other, again = build(OPTIMIZERS["adam"], model=model(seed=1))
    zero.load(shared_folder / "a", other, again)
    loaded = np.concatenate([p.master.numpy().reshape(-1) for p in again.step.pieces] or [X[0]])
    np.testing.assert_array_equal(masters, loaded)
    train(other, again, 3, 6)
    same(first, other)
    wide, opt = build(OPTIMIZERS["adam"], model=model("float32", seed=1))
    zero.load(shared_folder / "a", wide, opt)
    read = np.concatenate([p.read().numpy().reshape(-1) for p in opt.step.pieces] or [X[0]])
    np.testing.assert_array_equal(masters, read)


def noisy_model():
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((7,)),
            layers.Dense(9),
            layers.BatchNormalization(),
            layers.Dropout(0.4),
            layers.Dense(1),
        ]
    )


def test_statistics_seeds_and_generators_come_back(shared_folder):
    model, opt = build(OPTIMIZERS["adam"], model=noisy_model())
    np.random.seed(RANK)
    train(model, opt, 0, 3)
    zero.save(shared_folder / "a", model, opt)
    train(model, opt, 3, 6)
    drawn = np.random.rand()
    other, again = build(OPTIMIZERS["adam"], model=noisy_model())
    zero.load(shared_folder / "a", other, again)
    train(other, again, 3, 6)
    assert np.random.rand() == drawn
    same(model, other)


def fit_model(stage, seed=7):
    model = make_model(seed)
    model.compile(zero.DistributedOptimizer(keras.optimizers.Adam(0.01), stage=stage), loss="mse")
    return model


def data():
    pairs = tf.data.Dataset.from_tensor_slices((X, Y)).shard(SIZE, RANK)
    return pairs.batch(4)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_fit_resumes_where_it_stopped(shared_folder, asynchronous):
    whole = fit_model(2)
    whole.fit(data(), epochs=4)

    def callbacks():
        average = zero.callbacks.MetricAverage()
        return [
            average,
            zero.callbacks.Checkpoint(
                shared_folder / "ckpt", monitor="loss", keep=2, asynchronous=asynchronous
            ),
        ]

    first = fit_model(2)
    first.fit(data(), epochs=2, callbacks=callbacks())
    second = fit_model(1, seed=1)
    seen = second.fit(data(), epochs=4, callbacks=callbacks())
    assert seen.epoch == [2, 3]
    assert_same(values(second), values(whole))
    third = fit_model(2)
    assert third.fit(data(), epochs=4, callbacks=callbacks()).epoch == []
    same(second, third)
    manager = zero.CheckpointManager(shared_folder / "ckpt")
    assert manager.latest is not None and manager.best is not None


def test_fit_saves_every_few_steps(shared_folder):
    model = fit_model(2)
    checkpoint = zero.callbacks.Checkpoint(shared_folder / "ckpt", every=3, keep=None)
    steps = len(list(data()))
    model.fit(data(), epochs=2, callbacks=[checkpoint])
    hvd.allreduce(tf.zeros(1), name="fitted")
    found = sorted(int(p.name[5:]) for p in (shared_folder / "ckpt").iterdir())
    assert found == [s for s in range(1, 2 * steps + 1) if s % 3 == 0]


def test_damage_is_reported_by_all_ranks_and_nothing_is_loaded(shared_folder):
    model, opt = build(OPTIMIZERS["adam"])
    train(model, opt, 0, 2)
    zero.save(shared_folder / "a", model, opt)
    train(model, opt, 2, 3)
    before = values(model)
    file = sorted((shared_folder / "a").glob("shard-*"))[-1]
    hvd.allreduce(tf.zeros(1), name="together")
    if RANK == 0:
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        file.write_bytes(damaged)
    hvd.allreduce(tf.zeros(1), name="damaged")
    with pytest.raises(zero.CorruptCheckpointError, match=file.name):
        zero.load(shared_folder / "a", model, opt)
    for a, b in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(opt.iterations) == 3


def test_checkpoints_of_other_models_and_optimizers_are_refused(shared_folder):
    model, opt = build(OPTIMIZERS["sgd"])
    train(model, opt, 0, 1)
    zero.save(shared_folder / "a", model, opt)
    other, again = build(OPTIMIZERS["adam"])
    with pytest.raises(ValueError, match="saved with SGD, this is AdamW"):
        zero.load(shared_folder / "a", other, again)
    other, again = build(OPTIMIZERS["sgd"], model=noisy_model())
    with pytest.raises(ValueError, match=r"has shape|lacks"):
        zero.load(shared_folder / "a", other, again)
    with pytest.raises(zero.CheckpointError, match="there is no checkpoint"):
        zero.load(shared_folder / "none", other, again)


def test_plain_files_in_and_out(shared_folder):
    from zerohvd.cli import main

    model, opt = build(OPTIMIZERS["adam"], model=noisy_model())
    train(model, opt, 0, 3)
    zero.save(shared_folder / "a", model, opt)
    for name in ("model.weights.h5", "model.safetensors"):
        out = shared_folder / name
        if RANK == 0:
            assert main(["checkpoint", "consolidate", str(shared_folder / "a"), str(out)]) == 0
        hvd.allreduce(tf.zeros(1), name="written")
        other, again = build(OPTIMIZERS["adam"], 1, noisy_model())
        if name.endswith(".h5"):
            plain = noisy_model()
            plain.load_weights(out)
            for a, b in zip(plain.trainable_variables, model.trainable_variables, strict=True):
                np.testing.assert_array_equal(a.numpy(), b.numpy())
            zero.load(out, other, again)
        else:
            zero.load(out, other, again, strict=False)
            continue  # names of layers are numbered, so they may differ here
        for a, b in zip(other.trainable_variables, model.trainable_variables, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        train(other, again, 3, 4)
