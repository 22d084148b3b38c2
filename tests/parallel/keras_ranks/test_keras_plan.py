"""What zero.plan says before the run is what memory_report and communication_report say in it."""

from __future__ import annotations

import keras
import keras_world as world
import numpy as np
import pytest
import stage3_world
import tensorflow as tf

import zerohvd.keras as zero
from zerohvd.planning.plan import NothingFitsError

RANKS = (2, 3)  # what is planned is the same arithmetic for more

BATCH = 8


def wide():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(128, activation="tanh") for _ in range(4)]
    norm = keras.layers.BatchNormalization()
    return keras.Sequential([keras.Input((96,)), *layers, norm, keras.layers.Dense(3)])


def half():
    with_policy = keras.DTypePolicy("float16")
    layers = [keras.layers.Dense(128, dtype=with_policy) for _ in range(4)]
    return keras.Sequential([keras.Input((96,), dtype="float16"), *layers])


def train(model, optimizer):
    inputs = tf.ones((BATCH, *model.input_shape[1:]), model.inputs[0].dtype)
    variables = model.trainable_variables
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(model(inputs, training=True), tf.float32) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)


def adafactor():
    return keras.optimizers.Adafactor(1e-3)


@pytest.mark.parametrize("make", [wide, half, stage3_world.transformer])
@pytest.mark.parametrize("inner", [keras.optimizers.AdamW, adafactor])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plan_is_what_the_reports_say_later(stage, inner, make):
    model, optimizer = make(), inner()
    plan = zero.plan(model, optimizer, bucket_bytes=40_000)
    planned = plan.row(stage)
    fixed = plan.workload.fixed
    model, optimizer = zero.zeroify(model, optimizer, stage=stage, bucket_bytes=40_000)
    train(model, optimizer)
    report, expected = zero.memory_report(optimizer), planned.memory.reported(grads=False)
    keys = ("params", "optimizer", "master")
    everyone = zero.allgather_object([report[k] for k in keys])
    most = max(everyone, key=sum)
    for key, held in zip(keys, most, strict=True):
        extra = fixed if key == "params" else 0
        # Buckets are padded in a plan, and shards of variables in memory are not.
        assert expected[key] == pytest.approx(held + extra, rel=0.03, abs=2500), key
    if inner is keras.optimizers.AdamW:
        seen = zero.communication_report(optimizer)["total"].bytes
        assert planned.moved == pytest.approx(seen, rel=0.02, abs=1000)


def test_a_plan_of_a_model_without_memory_is_the_same_and_gives_it_none():
    real = wide()
    with zero.deferred_init():
        deferred = wide()
    batch = np.zeros((BATCH, 96), "float32")
    plans = [
        zero.plan(m, keras.optimizers.AdamW(), ranks=[2, 8], batch=batch) for m in (real, deferred)
    ]
    assert plans[0].as_dict()["rows"] == plans[1].as_dict()["rows"]
    # What the layers hand on: the outputs of four layers, of the batch norm before and after.
    saved = plans[0].rows[0].memory.activations
    assert 4 * BATCH * 128 * 4 <= saved <= 9 * BATCH * 128 * 4
    kernels = [v for v in deferred.variables if np.prod(v.shape) >= 4096]
    assert {type(v).__name__ for v in kernels} == {"DeferredVariable"}


def test_auto_takes_the_lowest_stage_that_fits_on_all_ranks(capsys):
    model = wide()
    plan = zero.plan(model, keras.optimizers.AdamW())
    memory = plan.row(1).memory.peak
    lowest = next(r.stage for r in plan.rows if r.memory.peak <= memory)
    model, optimizer = zero.zeroify(
        model, keras.optimizers.AdamW(), stage="auto", memory=memory
    )
    train(model, optimizer)
    assert optimizer.config.stage == lowest
    said = capsys.readouterr().out
    words = f"zerohvd: stage='auto' takes stage {lowest} on {world.SIZE} rank"
    assert (words in said) == (world.RANK == 0)


def test_auto_raises_on_all_ranks_if_nothing_fits():
    with pytest.raises(NothingFitsError, match="nothing fits"):
        zero.zeroify(wide(), keras.optimizers.AdamW(), stage="auto", memory="1KiB")
    with pytest.raises(ValueError, match="stage='auto' needs the memory of a rank"):
        zero.zeroify(wide(), keras.optimizers.AdamW(), stage="auto")


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="plan needs an optimizer"):
        zero.plan(wide())
    with pytest.raises(ValueError, match="needs a built model"):
        zero.plan(keras.Sequential([keras.layers.Dense(3)]), keras.optimizers.SGD())
    with pytest.raises(ValueError, match="sharded already"):
        zero.plan(wide(), zero.DistributedOptimizer(keras.optimizers.SGD()))


@world.at_two_ranks
def test_a_variable_without_memory_can_be_read_in_the_scope_that_made_it():
    with zero.deferred_init():
        variable = keras.Variable(initializer="ones", shape=(100, 100), dtype="float32")
        assert variable.value.shape == (100, 100)
        assert float(tf.reduce_sum(variable.value)) == 10_000
        other = keras.Variable(initializer="ones", shape=(100, 100), dtype="float32")
        with keras.StatelessScope(state_mapping=[(other, tf.zeros((100, 100)))]):
            assert float(tf.reduce_sum(other.value)) == 0
    assert type(other).__name__ == "DeferredVariable"
