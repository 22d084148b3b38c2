"""A training of Keras that loses a rank in its third epoch.

    zerohvd run --restarts 1 -- mpirun -np 2 python elastic_keras_job.py FOLDER STAGE

When it has come to its end, each rank trains another model of the same first values without
interruption, and says whether the two are the same.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import keras
import numpy as np
import saying

import zerohvd.keras as zero

EPOCHS = 4
RESTART = int(os.environ.get("ZEROHVD_RESTART", "0"))


class Kill(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (RESTART, hvd.rank(), self.epoch, batch) == (0, 1, 2, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def build(stage: int) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(17, "tanh"), layers.Dropout(0.3, seed=5), layers.Dense(1)]
    )
    model, opt = zero.zeroify(model, keras.optimizers.AdamW(1e-2), stage=stage)
    model.compile(optimizer=opt, loss="mse")
    return model


def fit(model: keras.Model, first: int, *callbacks) -> None:
    rng = np.random.default_rng(hvd.rank())
    x, y = rng.normal(size=(12, 5)), rng.normal(size=(12, 1))
    model.fit(
        x, y, batch_size=4, shuffle=False, verbose=0, initial_epoch=first, epochs=EPOCHS,
        callbacks=list(callbacks),
    )  # fmt: skip


def values(model: keras.Model) -> list[np.ndarray]:
    with zero.gathered(model):
        return [v.numpy() for v in model.variables]


def main() -> None:
    folder, stage = Path(sys.argv[1]), int(sys.argv[2])
    hvd.init()
    model = build(stage)

    @zero.elastic.run
    def train(state):
        saying.say(folder, hvd.rank(), f"start {RESTART}: epoch {state.epoch}")
        fit(model, state.epoch, zero.elastic.CommitStateCallback(state), Kill())

    train(zero.elastic.KerasState(model, epoch=0))
    whole = build(stage)
    fit(whole, 0)
    same = all(map(np.array_equal, values(model), values(whole)))
    saying.say(folder, hvd.rank(), f"same: {same}")


if __name__ == "__main__":
    main()
