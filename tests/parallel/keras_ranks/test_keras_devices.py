"""What can be proven of GPUs without one: bfloat16 can travel as NCCL wants it."""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest

import zerohvd.keras as zero

RANKS = [2, 3]
X = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
Y = X.sum(1, keepdims=True)


def trained(stage):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(n, dtype="bfloat16") for n in (7, 1)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    model, _ = zero.zeroify(model, stage=stage)
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    with zero.gathered(model):
        return [np.asarray(keras.ops.cast(v, "float32")) for v in model.trainable_variables]


@pytest.mark.parametrize("stage", [1, 3])
def test_bfloat16_travels_as_bytes_where_16_bit_integers_are_not_known(stage, monkeypatch):
    expected = trained(stage)
    monkeypatch.setattr(hvd, "nccl_built", lambda: True)
    for found, wanted in zip(trained(stage), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
