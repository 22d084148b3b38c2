"""Keras: signals end `fit` and loops with a checkpoint, from which they go on."""

from __future__ import annotations

import os
import signal

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero
from zerohvd.preemption import listen

RANKS = [2]
X = np.random.default_rng(0).normal(size=(96, 5)).astype("float32")
Y = X.sum(1, keepdims=True)


@pytest.fixture(autouse=True)
def plain_signals():
    """Whoever leaves listens until its process has ended."""
    yield
    listen(()).stop()


def make(stage, seed=0):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return zero.zeroify(model, stage=stage)[0]


def data():
    mine = slice(hvd.rank(), None, hvd.size())
    return tf.data.Dataset.from_tensor_slices((X[mine], Y[mine])).batch(4)


class SignalAt(keras.callbacks.Callback):
    def __init__(self, step, rank):
        super().__init__()
        self.step, self.rank = step, rank

    def on_train_batch_begin(self, batch, logs=None):
        now = int(np.asarray(self.model.optimizer.iterations))
        if now == self.step and hvd.rank() == self.rank % hvd.size():
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("stage", [1, 3])
def test_fit_goes_on_in_the_middle_of_an_epoch_as_if_it_had_never_left(stage, shared_folder):
    whole = make(stage).fit(data(), epochs=2, verbose=0)
    # In the middle of the first epoch, and in its last batch: between two epochs.
    for seed, at, rank in ((0, 2, -1), (1, len(data()) - 1, 0)):
        with pytest.raises(SystemExit) as leaving:
            callbacks = [zero.callbacks.Preemption(shared_folder), SignalAt(at, rank)]
            make(stage, seed).fit(data(), epochs=2, verbose=0, callbacks=callbacks)
        assert leaving.value.code == 85
    callbacks = [zero.callbacks.Preemption(shared_folder)]
    found = make(stage, 2).fit(data(), epochs=2, verbose=0, callbacks=callbacks)
    assert found.history == whole.history  # to the last bit


def test_fit_with_several_steps_per_execution_goes_on(shared_folder):
    def made(seed):
        model = make(2, seed)
        model.steps_per_execution = 2
        return model

    whole = made(0).fit(data(), epochs=2, verbose=0)
    with pytest.raises(SystemExit):
        callbacks = [zero.callbacks.Preemption(shared_folder), SignalAt(2, 0)]
        made(0).fit(data(), epochs=2, verbose=0, callbacks=callbacks)
    callbacks = [zero.callbacks.Preemption(shared_folder)]
    found = made(2).fit(data(), epochs=2, verbose=0, callbacks=callbacks)
    assert found.history == whole.history


def test_another_callback_that_loads_is_refused(shared_folder):
    other = zero.callbacks.Checkpoint(shared_folder / "b")
    make(1).fit(data(), epochs=1, verbose=0, callbacks=[other])
    with pytest.raises(SystemExit):
        callbacks = [zero.callbacks.Preemption(shared_folder / "a"), SignalAt(2, 0)]
        make(1).fit(data(), epochs=1, verbose=0, callbacks=callbacks)
    callbacks = [
        zero.callbacks.Preemption(shared_folder / "a"),
        zero.callbacks.Checkpoint(shared_folder / "b"),
    ]
    with pytest.raises(ValueError, match="resume=False"):
        make(1).fit(data(), epochs=3, verbose=0, callbacks=callbacks)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_loop_leaves_and_goes_on(stage, shared_folder):
    def run(folder, signalled_in, losses):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        opt = zero.DistributedOptimizer(keras.optimizers.Adam(0.01), stage=stage)
        opt.build(model.trainable_variables)

        @tf.function
        def train(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss

        with zero.preemption(folder, model, opt, state=losses, every=3) as job:
            for step in range(job.start_step, 8):
                rows = slice(step * 12 + 4 * hvd.rank(), step * 12 + 4 * hvd.rank() + 4)
                if step == signalled_in and hvd.rank() == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                losses["losses"].append(float(train(X[rows], Y[rows])))
                job.step_done(step)

    whole, parts = {"losses": []}, {"losses": []}
    run(shared_folder / "whole", None, whole)
    with pytest.raises(SystemExit):
        run(shared_folder / "parts", 3, parts)
    run(shared_folder / "parts", None, parts)
    if hvd.rank() == 0:
        assert parts == whole
