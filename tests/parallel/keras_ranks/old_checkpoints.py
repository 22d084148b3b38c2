"""The trainings behind the Keras checkpoints in tests/data/checkpoints-v1.

They use public names of zerohvd only, so that any version can record them:

    mpirun -np 2 python tests/parallel/keras_ranks/old_checkpoints.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import zerohvd.keras as zero


@dataclass(frozen=True)
class Case:
    """A training that is saved after `passes` calls of apply_gradients."""

    stage: int
    passes: int = 3
    per_step: int = 1

    def build(self, seed: int = 0, stage: int | None = None) -> tuple[Any, Any]:
        keras.utils.set_random_seed(seed)
        layers = keras.layers
        model = keras.Sequential(
            [
                layers.Input((4,)),
                layers.Dense(5, activation="tanh"),
                layers.BatchNormalization(),
                layers.Dense(3, trainable=False),
                layers.Dropout(0.0, seed=5),
                layers.Dense(2),
            ]
        )
        accumulate = self.per_step if self.per_step > 1 else None
        opt = zero.DistributedOptimizer(
            keras.optimizers.Adam(0.02, gradient_accumulation_steps=accumulate),
            stage=self.stage if stage is None else stage,
            bucket_bytes=60,
        )
        opt.build(model.trainable_variables)
        return model, opt

    def train(self, model: Any, opt: Any, passes: range, *, alike: bool) -> list[float]:
        """Returns the losses.

        Args:
            alike: Every rank has the same data, so that results depend on the number of ranks in
                the last bits only.
        """
        losses = []
        for number in passes:
            rng = np.random.default_rng([number, 99 if alike else hvd.rank()])
            x = rng.normal(size=(4, 4)).astype("float32")
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - 1.0) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            losses.append(float(loss))
        return losses

    @property
    def rest(self) -> range:
        """The passes after the checkpoint: two updates are completed."""
        done = self.passes % self.per_step
        return range(self.passes, self.passes - done + 2 * self.per_step)


CASES = {
    "keras-stage2": Case(2),
    "keras-stage1-accumulating": Case(1, passes=5, per_step=3),
    "keras-stage2-accumulating": Case(2, passes=5, per_step=3),
}


def extra() -> dict[str, Any]:
    return {"epoch": 2, "order": (3, 1), "mean": np.arange(3.0)}


def seed_generators() -> None:
    random.seed(hvd.rank())
    np.random.seed(10 + hvd.rank())


def drawn() -> list[float]:
    """The next number of each generator."""
    return [random.random(), float(np.random.random())]


def values(model: Any) -> list[Any]:
    """In the model's order: Keras numbers the names of layers."""
    return [v.numpy().astype("float64").tolist() for v in model.variables]


def record(folder: Path) -> None:
    hvd.init()
    for name, case in CASES.items():
        model, opt = case.build()
        case.train(model, opt, range(case.passes), alike=False)
        seed_generators()
        zero.save(folder / name, model, opt, extra(), step=case.passes)
        expected = {"drawn": drawn(), "saved": values(model)}
        expected["losses"] = case.train(model, opt, case.rest, alike=True)
        expected["continued"] = values(model)
        everyone = hvd.allgather_object(expected, name=name)
        if hvd.rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(everyone) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
