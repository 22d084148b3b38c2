from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch

from zerohvd.communication import weighting
from zerohvd.launchers import detect

torch.set_num_threads(1)
# Registered at the start: with HOROVOD_DYNAMIC_PROCESS_SETS=1 Horovod's background thread holds a
# lock while it waits for the other ranks, and some kernels then let a rank's own calls starve.
RANKS = detect(os.environ).size or 1
DEVICE = os.environ.get("ZEROHVD_TEST_DEVICE") or "cpu"
FIRST, OTHERS = hvd.ProcessSet([0]), hvd.ProcessSet(list(range(1, RANKS)))
hvd.init(process_sets=[FIRST, OTHERS] if RANKS > 1 else None)
if DEVICE != "cpu":
    # Tests name no device: what they make lies where this says, one GPU per rank.
    torch.cuda.set_device(hvd.local_rank())
    torch.set_default_device(torch.device(DEVICE, hvd.local_rank()))


@pytest.fixture(scope="session")
def device():
    """Where tests train."""
    return torch.get_default_device()


@pytest.fixture(autouse=True)
def start_together():
    """A test begins when all ranks have finished the one before, and inherits nothing."""
    weighting.clear()
    hvd.barrier()
    yield


@pytest.fixture
def shared_folder():
    """A new folder that all ranks see."""
    made = tempfile.mkdtemp() if hvd.rank() == 0 else None
    path = Path(hvd.broadcast_object(made, root_rank=0, name="folder"))
    yield path
    hvd.barrier()
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
