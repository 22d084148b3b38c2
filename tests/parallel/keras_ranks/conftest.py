from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import pytest
import tensorflow as tf

from zerohvd.keras import weighting

hvd.init()


@pytest.fixture(autouse=True)
def start_together():
    """A test begins when all ranks have finished the one before, and inherits nothing."""
    weighting.clear()
    keras.utils.set_random_seed(7)  # of datasets too
    hvd.allreduce(tf.zeros([1]), name="start_together")  # the TensorFlow module has no barrier
    yield
