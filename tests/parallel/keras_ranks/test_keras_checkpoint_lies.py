"""A checkpoint that lies about itself is refused, and nothing of it is taken."""

from __future__ import annotations

import random

import checkpoint_lies
import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_world import RANK, SIZE

import zerohvd.keras as zero
from zerohvd.keras.optimizer import state

RANKS = (1, 2)  # hundreds of loads

EVERY = 97  # of some ten thousand lies


def small_model():
    layers = [
        keras.layers.Input((3,)),
        keras.layers.Dense(4),
        keras.layers.Dropout(0.5, seed=1),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(2),
    ]
    return keras.Sequential(layers)


class Job:
    """All that a load changes."""

    def __init__(self, stage: int, steps: int, make=lambda: keras.optimizers.Adam(0.01)) -> None:
        keras.utils.set_random_seed(steps)
        self.model = small_model()
        self.opt = zero.DistributedOptimizer(make(), stage=stage)
        self.opt.build(self.model.trainable_variables)
        keras.random.normal((1,))
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = np.random.default_rng(RANK).normal(size=(4, 3)).astype("float32")
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.model(x, training=True) - 1.0) ** 2)
            grads = tape.gradient(loss, self.model.trainable_variables)
            self.opt.apply_gradients(zip(grads, self.model.trainable_variables, strict=True))

    def held(self) -> dict[str, bytes]:
        """Bit by bit; without calls between ranks."""
        found = {f"{i}": v.numpy().tobytes() for i, v in enumerate(self.model.variables)}
        for slot in state.slots(self.opt):
            found[slot.key] = slot.variable.numpy().tobytes()
        for key, variable in state.scalars(self.opt).items():
            found[key] = np.asarray(variable).tobytes()
        found["python"] = repr(random.getstate()).encode()
        found["numpy"] = repr(np.random.get_state()).encode()
        return found


@pytest.mark.skipif(SIZE > 1, reason="hundreds of loads")
@pytest.mark.parametrize("stage", [0, 2])
def test_every_lie_is_refused_or_without_effect(shared_folder, stage):
    good, path = shared_folder / "good", shared_folder / "lie"
    right = Job(stage, steps=2)
    zero.save(good, right.model, right.opt, extra={"epoch": 1})
    right = right.held()
    checkpoint_lies.copied(good, path)
    victim = Job(stage, steps=1)
    before, refused = victim.held(), 0
    for told in checkpoint_lies.lies(checkpoint_lies.read(good), every=EVERY, first=stage):
        checkpoint_lies.write(path, told.document)
        try:
            zero.load(path, victim.model, victim.opt)
        except zero.CheckpointError as error:
            refused += 1
            assert str(path) in str(error), told.what
            assert victim.held() == before, told.what
        except BaseException as error:
            raise AssertionError(told.what) from error
        else:
            # Numbers in the manifest itself are what it says; tensors are what was saved.
            now = victim.held()
            tensors = [k for k in right if not k.startswith(("scalar", "python", "numpy"))]
            assert all(now[k] == right[k] for k in tensors), told.what
            before = now
    assert refused > 50


LIES = {
    "shape": (lambda d, key: d["tensors"][key].update(shape=d["tensors"][key]["shape"][::-1]),
              "has shape"),
    "flat": (lambda d, key: d["tensors"][key].update(
        shape=[int(np.prod(d["tensors"][key]["shape"]))]), "has shape"),
    "gone": (lambda d, key: d["tensors"].pop(key), "holds no _momentums"),
    "iterations": (lambda d, key: d["state"]["scalars"].update(_iterations="x"), "iterations"),
    "many": (lambda d, key: d["state"]["scalars"].update(_iterations=[1, 2]), "iterations"),
    "fraction": (lambda d, key: d["state"]["scalars"].update(_iterations=1.5), "iterations"),
    "nan": (lambda d, key: d["state"]["scalars"].update(_iterations={"!float": "nan"}),
            "iterations"),
    "rng": (lambda d, key: d["rank_states"][0]["rng"].update(numpy=[]), "generator 'numpy'"),
    "seed": (lambda d, key: d["rank_states"][0]["rng"].update(keras=[1, 2, 3]), "global seed"),
}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_told_to_all_ranks_and_nothing_changes(shared_folder, stage, name):
    change, match = LIES[name]
    good, path = shared_folder / "good", shared_folder / "lie"
    right = Job(stage, steps=2)
    zero.save(good, right.model, right.opt)
    hvd.allreduce(tf.zeros(1), name="saved")
    if RANK == 0:
        checkpoint_lies.copied(good, path)
        document = checkpoint_lies.read(path)
        kernels = [k for k in document["tensors"] if k.startswith("state._momentums/")]
        key = next(k for k in kernels if len(document["tensors"][k]["shape"]) == 2)
        change(document, key)
        checkpoint_lies.write(path, document)
    hvd.allreduce(tf.zeros(1), name="lied")
    victim = Job(stage, steps=1)
    before = victim.held()
    with pytest.raises(zero.CheckpointError, match=match):
        zero.load(path, victim.model, victim.opt)
    assert victim.held() == before
    zero.load(good, victim.model, victim.opt)
    victim.train(1)


@pytest.mark.parametrize("stage", [0, 2])
def test_state_of_whole_tensor_optimizers_has_the_shape_they_make(shared_folder, stage):
    good, path = shared_folder / "good", shared_folder / "lie"
    job = Job(stage, 2, lambda: keras.optimizers.Adafactor(0.01))
    zero.save(good, job.model, job.opt)
    hvd.allreduce(tf.zeros(1), name="saved")
    if RANK == 0:
        checkpoint_lies.copied(good, path)
        document = checkpoint_lies.read(path)
        tensors = document["tensors"]
        keys = [k for k in tensors if k.startswith("state._r/") and tensors[k]["shape"] == [3]]
        tensors[keys[0]]["shape"] = [1, 3]
        checkpoint_lies.write(path, document)
    hvd.allreduce(tf.zeros(1), name="lied")
    before = job.held()
    with pytest.raises(zero.CheckpointError, match="has shape"):
        zero.load(path, job.model, job.opt)
    assert job.held() == before
    zero.load(good, job.model, job.opt)
    job.train(1)
