from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import pytest
import tensorflow as tf

from zerohvd.keras.optimizer import weighting

hvd.init()


@pytest.fixture(autouse=True)
def start_together():
    """A test begins when all ranks have finished the one before, and inherits nothing."""
    weighting.clear()
    keras.utils.set_random_seed(7)  # of datasets too
    hvd.allreduce(tf.zeros([1]), name="start_together")  # the TensorFlow module has no barrier
    yield


@pytest.fixture
def shared_folder():
    """A new folder that all ranks see."""
    made = tempfile.mkdtemp() if hvd.rank() == 0 else None
    path = Path(hvd.broadcast_object(made, root_rank=0, name="folder"))
    yield path
    hvd.allreduce(tf.zeros([1]), name="folder_done")
    if hvd.rank() == 0:
        shutil.rmtree(path)
