from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import pytest
import tensorflow as tf

from zerohvd.keras.optimizer import weighting
from zerohvd.launchers import detect

# Registered at the start: with HOROVOD_DYNAMIC_PROCESS_SETS=1 Horovod's background thread holds a
# lock while it waits for the other ranks, and some kernels then let a rank's own calls starve.
RANKS = detect(os.environ).size or 1
FIRST, OTHERS = hvd.ProcessSet([0]), hvd.ProcessSet(list(range(1, RANKS)))
hvd.init(process_sets=[FIRST, OTHERS] if RANKS > 1 else None)
# TensorFlow takes every GPU it sees, and tests name no device: one per rank, or none.
GPUS = tf.config.list_physical_devices("GPU")
ON_GPUS = os.environ.get("ZEROHVD_TEST_DEVICE", "cpu").startswith("cuda")
tf.config.set_visible_devices([GPUS[hvd.local_rank()]] if ON_GPUS else [], "GPU")


@pytest.fixture(scope="session")
def device():
    """Where tests train."""
    return "GPU:0" if ON_GPUS else "CPU:0"


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


@pytest.fixture(scope="session")
def members():
    """All ranks but the first; with one rank, that one."""
    return OTHERS if RANKS > 1 else hvd.global_process_set


@pytest.fixture(scope="session")
def only_first():
    """The first rank."""
    return FIRST if RANKS > 1 else hvd.global_process_set
