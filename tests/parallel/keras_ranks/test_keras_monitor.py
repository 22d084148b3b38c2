"""zero.callbacks.Monitor: its numbers are right, and it names the rank that is slow."""

from __future__ import annotations

import json
import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero
from zerohvd.monitoring.trace import merge


class Kept:
    def __init__(self):
        self.records = []

    def log(self, record):
        self.records.append(record)


class Slow(keras.callbacks.Callback):
    """The last rank is late to every step by 20 ms."""

    def on_train_batch_begin(self, batch, logs=None):
        if hvd.rank() == hvd.size() - 1:
            time.sleep(0.02)


def compiled(stage, scaled=False):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(24, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((16,)), *layers, keras.layers.Dense(4)])
    inner = keras.optimizers.Adam(1e-3)
    if scaled:
        inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if stage == 3:
        model, optimizer = zero.zeroify(model, inner, stage=3)
    else:
        optimizer = zero.DistributedOptimizer(inner, stage=stage, bucket_bytes=2048)
    model.compile(optimizer, loss=loss)
    return model


def data(steps, bad=()):
    rng = np.random.default_rng(hvd.rank())
    x = rng.normal(size=(steps, 8, 16)).astype("float32")
    for step in bad if hvd.rank() == 0 else ():
        x[step] = np.inf
    return tf.data.Dataset.from_tensor_slices((x, np.tile(np.arange(8) % 4, (steps, 1))))


@pytest.mark.parametrize("stage", [1, 3])
def test_numbers_of_a_fit_and_the_slow_rank(stage, tmp_path):
    model, kept = compiled(stage), Kept()
    folder = zero.broadcast_object(str(tmp_path), name="folder")
    monitor = zero.callbacks.Monitor(
        samples=8, to=[kept, f"{folder}/run.jsonl"], trace=f"{folder}/trace"
    )
    model.fit(data(20), epochs=1, verbose=0, callbacks=[monitor, Slow()])
    moved, held = zero.communication_report(model), zero.memory_report(model)
    last = monitor.last  # on every rank
    assert last["step"] == 20
    parts = last["time/compute"] + last["time/communication"] + last["time/update"]
    assert parts == pytest.approx(last["time/step"], rel=1e-6)
    assert last["samples_per_second"] == pytest.approx(8 * hvd.size() / last["time/step"])
    assert {op: last[f"bytes/{op}"] for op in moved} == {op: t.bytes for op, t in moved.items()}
    assert {kind: last[f"memory/{kind}"] for kind in held} == dict(held)
    assert last["grad_norm"] > 0 and last["loss"] > 0
    if hvd.size() > 1:
        assert len(last["ranks/communication"]) == hvd.size()
    hvd.allreduce(tf.zeros([1]), name="all have written")
    if hvd.rank() == 0:
        lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
        assert [r["step"] for r in lines] == [10, 20] == [r["step"] for r in kept.records]
        # Of two records one will do: more ranks than cores are slow by turns.
        slow = hvd.size() - 1
        named = [r["slowest"] for r in lines if r["slowest_rank"] == slow]
        assert named or slow == 0, [(r["slowest"], r["ranks/communication"]) for r in lines]
        traced = merge(tmp_path / "trace")["traceEvents"]
        assert {e["pid"] for e in traced} == set(range(hvd.size()))
        if hvd.size() > 1:
            named = {e["args"].get("parameter") for e in traced if e["ph"] == "X"}
            assert any(n and "dense" in n for n in named), named


def test_the_norm_is_that_of_the_gradients_of_all_ranks():
    model = compiled(2)
    monitor = zero.callbacks.Monitor(every=1, to=())
    batch = next(iter(data(1)))
    with tf.GradientTape() as tape:
        loss = model.compute_loss(*batch, model(batch[0], training=True))
    grads = tape.gradient(loss, model.trainable_variables)
    mean = [hvd.allreduce(g, op=hvd.Average, name=f"g{i}") for i, g in enumerate(grads)]
    model.fit(data(1), verbose=0, callbacks=[monitor])
    assert monitor.last["grad_norm"] == pytest.approx(float(tf.linalg.global_norm(mean)), rel=1e-4)


def test_skipped_steps_and_the_loss_scale_are_counted():
    model = compiled(2, scaled=True)
    monitor = zero.callbacks.Monitor(every=4, to=())
    model.fit(data(8, bad=(0, 5, 6)), verbose=0, callbacks=[monitor])
    assert (monitor.last["skipped"], monitor.last["skipped_total"]) == (2, 3)
    assert monitor.last["loss_scale"] == 0.5


def test_a_model_that_was_trained_before_is_measured_too():
    model = compiled(2)
    model.fit(data(3), verbose=0)
    monitor = zero.callbacks.Monitor(every=2, to=())
    model.fit(data(4), verbose=0, callbacks=[monitor])
    assert monitor.last["step"] == 7 and monitor.last["grad_norm"] > 0
    assert monitor.last["time/update"] > 0


def test_ranks_that_do_not_all_have_a_monitor_are_told_at_once():
    if hvd.size() == 1:
        pytest.skip("there is nobody to differ from")
    model = compiled(2)
    callbacks = [zero.callbacks.Monitor(to=())] if hvd.rank() == 0 else []
    with pytest.raises(zero.DisagreementError, match=r"zero\.callbacks\.Monitor"):
        model.fit(data(2), verbose=0, callbacks=callbacks)
