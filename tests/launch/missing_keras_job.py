"""The last rank goes wrong, in the way it is told; the others must find out and say so."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from saying import say

import zerohvd.keras as zero

how, stage, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
hvd.init()
bad = hvd.rank() == hvd.size() - 1
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
if stage == 3:
    model, opt = zero.zeroify(model, keras.optimizers.Adam(), stage=3, persist_below=0)
else:
    opt = zero.DistributedOptimizer(keras.optimizers.Adam(), stage=stage)
model.compile(optimizer=opt, loss="mse")
x, y = np.ones((32, 4), "f"), np.ones((32, 1), "f")


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if bad and batch == 2:
            raise ArithmeticError("a bad batch")


def batches(count):
    for _ in range(count):
        yield x[:8], y[:8]


def stay_away():
    """Until all other ranks have had their error."""
    while len(list(folder.glob("told *"))) < hvd.size() - 1:
        time.sleep(0.05)


def apply_gradients():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    opt.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def act():
    if how == "counts":
        for rows, epochs in ((16 if bad else 32, 1), (32, 2 if bad else 1)):
            for _ in range(2):  # before the optimizer is built, and after
                try:
                    model.fit(x[:rows], y[:rows], batch_size=8, epochs=epochs, verbose=0)
                except zero.DisagreementError as error:
                    say(folder, hvd.rank(), f"at once: {error}")
                model.fit(x, y, batch_size=8, verbose=0)
        model.fit(batches(3 if bad else 5), verbose=0)  # nobody can know how many
        stay_away()
    elif how == "elsewhere":
        try:
            model.fit(x, y, batch_size=8, verbose=0, callbacks=[Fails()])
        except ArithmeticError:
            zero.save(folder / "saved", model) if stage == 0 else hvd.allgather(tf.ones(3))
    elif how == "evaluates":
        model.fit(x, y, batch_size=8, verbose=0)
        if bad:
            model.evaluate(x, y, verbose=0)
            stay_away()
        model.fit(x, y, batch_size=8, verbose=0)
    elif how == "predicts":  # while the others do nothing at all
        if not bad:
            model.predict(x, verbose=0)
        stay_away()
    elif how == "alone":  # and every rank is told at once
        model.fit(x, y, batch_size=8, verbose=0)
        for mistake in (
            lambda: model.evaluate(x[:8], y[:8], verbose=0) if bad else model.predict(x[:8]),
            lambda: model.evaluate(x, y, verbose=0) if bad else model.fit(x, y, verbose=0),
            lambda: model.evaluate(x[: 8 if bad else 16], y[: 8 if bad else 16], 8, verbose=0),
        ):
            try:
                mistake()
            except zero.DisagreementError as error:
                say(folder, hvd.rank(), f"at once: {error}")
        for call in (model.get_weights, lambda: model.save(folder / "m.keras")):
            try:
                call()
            except zero.ShardedStateError as error:
                say(folder, hvd.rank(), f"at once: {error}")
        model.fit(x, y, batch_size=8, verbose=0)
    elif how == "own loop":
        for _ in range(2 if bad else 3):
            apply_gradients()
        stay_away()


start = time.monotonic()
try:
    act()
except Exception as error:
    seconds = time.monotonic() - start
    text = f"rank {hvd.rank()}: {seconds:.0f} s: {type(error).__name__}: {error}"
    say(folder, hvd.rank(), text)
    (folder / f"told {hvd.rank()}").touch()
    stay_away()
