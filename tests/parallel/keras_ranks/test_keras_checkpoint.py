"""A Keras training that is stopped and resumed goes on as if nothing had happened."""

from __future__ import annotations

import re

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_world import RANK, SIZE, X, Y, assert_ranks_agree, assert_same, few, make_model
from peak_memory import peak_growth

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


def test_a_save_on_one_rank_only_is_an_error_not_a_hang(shared_folder):
    if hvd.size() == 1:
        return
    model, opt = build(OPTIMIZERS["adam"])
    train(model, opt, 0, 1)
    calls = {True: lambda: zero.save(shared_folder / "a", model, opt),
             False: lambda: train(model, opt, 1, 2)}  # fmt: skip
    told = r"called zero.save\(\) while|trains while another rank called zero.save\(\)"
    with pytest.raises(zero.DisagreementError, match=told):
        calls[RANK == 0]()
    others = "rank 1" if hvd.size() == 2 else re.escape(f"ranks {list(range(1, hvd.size()))}")
    told = rf"rank 0 zero.save\(\), {others} zero.load\(\)"
    with pytest.raises(zero.DisagreementError, match=told):
        if RANK == 0:
            zero.save(shared_folder / "a", model, opt)
        else:
            zero.load(shared_folder / "a", model, opt)
    # Ranks that come together again go on.
    train(model, opt, 1, 2)
    zero.save(shared_folder / "a", model, opt)
    train(model, opt, 2, 3)
    zero.load(shared_folder / "a", model, opt)


@pytest.mark.parametrize("stage, uneven", [(0, False), (1, True), (2, False), (2, True)])
def test_fit_says_that_another_rank_saves(shared_folder, stage, uneven):
    if hvd.size() == 1:
        return
    model = fit_model(stage)
    given = zero.shard_dataset(data(), check=False) if uneven else data()
    model.fit(given, epochs=1)
    with pytest.raises(zero.DisagreementError, match=r"zero.save\(\)"):
        if RANK == 0:
            zero.save(shared_folder / "a", model)
        else:
            model.fit(given, epochs=1)
    zero.save(shared_folder / "a", model)
    assert zero.load(shared_folder / "a", model) is None


class SaveOnOneRank(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if RANK == 0:
            zero.save("never-written", self.model)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_save_while_others_add_up_gradients_is_an_error_not_a_hang(eager):
    if hvd.size() != 2:
        return
    model = fit_model(1)
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model.compile(zero.DistributedOptimizer(optimizer, stage=1), loss="mse", run_eagerly=eager)
    given = zero.shard_dataset(data(), check=False)
    model.fit(given, epochs=1, verbose=0)
    with pytest.raises(zero.DisagreementError, match=r"zero.save\(\)"):
        model.fit(given, epochs=1, verbose=0, callbacks=[SaveOnOneRank()])


SUFFIXES = (".weights.h5", ".safetensors", ".keras")


def write_plain(model, checkpoint, out):
    """What a user has: made by Keras from a plain model, or by `consolidate` from a checkpoint."""
    from zerohvd.tools.cli import main

    if out.suffix == ".safetensors":
        assert main(["checkpoint", "consolidate", str(checkpoint), str(out)]) == 0
    elif out.suffix == ".keras":
        model.save(out)
    else:
        model.save_weights(out)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_plain_files_into_a_sharded_model(shared_folder, suffix):
    model, opt = build(OPTIMIZERS["adam"], model=noisy_model())
    train(model, opt, 0, 3)
    zero.save(shared_folder / "a", model, opt)
    out = shared_folder / f"model{suffix}"
    plain = noisy_model()
    plain.compile("adam", "mse", metrics=["mae"])  # of which nothing is to be loaded
    plain.set_weights(model.get_weights())
    if RANK == 0:
        write_plain(plain, shared_folder / "a", out)
    # Statistics are each rank's own; a file holds those of the first.
    expected = [hvd.broadcast(w, 0, name=f"weight{i}") for i, w in enumerate(model.get_weights())]
    for stage in (0, 1, 2):
        # The layers of every further model have other numbers in their names.
        other, again = build(OPTIMIZERS["adam"], stage, noisy_model())
        assert not np.array_equal(other.get_weights()[0], model.get_weights()[0])
        zero.load(out, other, again)
        for a, b in zip(other.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(a, b)
        assert int(again.iterations) == 0
        train(other, again, 3, 4)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_plain_files_of_other_models_are_refused(shared_folder, suffix):
    def variant(units, more=False):
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(units, name="up"), keras.layers.Dense(3, name="down")]
        layers += [keras.layers.Dense(3, name="more")] if more else []
        return keras.Sequential([keras.Input((5,)), *layers])

    small, large, wide = variant(4), variant(4, more=True), variant(6)
    files = {}
    for name, model in (("small", small), ("large", large)):
        files[name] = shared_folder / f"{name}{suffix}"
        zero.save(shared_folder / name, model)
        if RANK == 0:
            write_plain(model, shared_folder / name, files[name])
    hvd.allreduce(tf.zeros(1), name="written")

    def refused(model, file, match):
        before = values(model)
        with pytest.raises(ValueError, match=match):
            zero.load(file, model)
        for a, b in zip(values(model), before, strict=True):
            np.testing.assert_array_equal(a, b)

    refused(large, files["small"], r"the model has 2 tensors that the checkpoint lacks .*more")
    refused(small, files["large"], r"the checkpoint has 2 tensors that the model lacks")
    refused(wide, files["small"], r"up/kernel' has shape \(5, 4\) in the checkpoint, but \(5, 6\)")
    small.set_weights([w + 1 for w in small.get_weights()])
    zero.load(files["large"], small, strict=False)
    for a, b in zip(small.get_weights(), large.get_weights()[:4], strict=True):
        np.testing.assert_array_equal(a, b)


def test_mistakes_of_a_save_are_told_before_anything_is_written(shared_folder):
    model, opt = build(OPTIMIZERS["sgd"])
    with pytest.raises(TypeError, match=r"state\.extra\.s is an array of object"):
        zero.save(shared_folder / "a", model, opt, extra={"s": tf.constant(["word"])})
    named = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name=f"of_{RANK}")])
    if SIZE > 1:
        with pytest.raises(ValueError, match=r"of_0/bias' is on one of them only"):
            zero.save(shared_folder / "a", named)
    hvd.allreduce(tf.zeros(1), name="refused")
    assert not list(shared_folder.iterdir())


def test_consolidated_weights_are_what_keras_reads(shared_folder):
    from zerohvd.tools.cli import main

    model, opt = build(OPTIMIZERS["adam"], model=noisy_model())
    train(model, opt, 0, 3)
    zero.save(shared_folder / "a", model, opt)
    plain = noisy_model()
    if RANK == 0:
        out = shared_folder / "model.weights.h5"
        assert main(["checkpoint", "consolidate", str(shared_folder / "a"), str(out)]) == 0
        plain.load_weights(out)
        for a, b in zip(plain.weights, model.weights, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_loading_takes_memory_for_the_own_shards_and_a_buffer(shared_folder):
    if hvd.size() > 2:
        return  # as many bytes on more ranks: nothing new, but time
    layers = [keras.layers.Dense(1024, use_bias=False) for _ in range(10)]
    model, opt = build(
        OPTIMIZERS["adam"], model=keras.Sequential([keras.Input((1024,)), *layers]),
        bucket_bytes=1 << 22,
    )  # fmt: skip
    zero.save(shared_folder / "a", model, opt)
    zero.load(shared_folder / "a", model, opt)  # TensorFlow sets itself up
    own = 3 * 4 * 10 * 1024 * 1024 // hvd.size()  # parameters and two moments
    grown = peak_growth(lambda: zero.load(shared_folder / "a", model, opt))
    assert own // 2 < grown < own + (16 << 20), (grown / 2**20, own / 2**20)
