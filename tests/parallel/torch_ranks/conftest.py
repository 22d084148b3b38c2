from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch

from zerohvd.torch.gradients import weighting

torch.set_num_threads(1)
hvd.init()


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
