"""Ranks on several hosts train as on one: what travels in two steps is the same."""

import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero
from zerohvd.config import ZeroConfig
from zerohvd.keras.communication.wire import Wire

RANKS = (4,)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parts_are_added_up_and_gathered(two_hosts, dtype):
    wire = Wire(None, ZeroConfig())
    for lengths in ([50000] * 4, [30001, 0, 70000, 1]):
        total = sum(lengths)
        expected = (np.arange(total) % 13 * 4 + 6).astype("float32")

        @tf.function
        def run(x, lengths=lengths):
            mine = wire.reducescatter(x, lengths, "scatter")
            return mine, wire.allgather(tf.cast(mine, dtype), lengths, "gather")

        mine, everything = run(tf.cast(np.arange(total) % 13 + wire.rank, dtype))
        start = sum(lengths[: wire.rank])
        np.testing.assert_array_equal(mine, expected[start : start + lengths[wire.rank]])
        np.testing.assert_array_equal(tf.cast(everything, "float32"), expected)


PACKED = {"compression": zero.Compression.int8, "param_compression": zero.Compression.int8}


@pytest.mark.parametrize("options", [{}, PACKED], ids=["", "int8"])
@pytest.mark.parametrize("stage", [1, 2])
def test_training_is_that_of_one_host(two_hosts, stage, options):
    def make():
        keras.utils.set_random_seed(7)
        return keras.Sequential(
            [keras.Input((7,)), keras.layers.Dense(8009, "tanh"), keras.layers.Dense(1)]
        )

    def sgd():
        return keras.optimizers.SGD(1e-4, momentum=0.9)

    expected = world.plain(sgd, make())
    got, _ = world.sharded(sgd, make(), stage=stage, **options)
    # Biases begin at zero: they are nothing but rounded updates.
    world.assert_same(got, expected, tolerance=1e-2 if options else 1e-5)
