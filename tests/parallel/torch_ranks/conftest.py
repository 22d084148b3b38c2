from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

from zerohvd.torch import weighting

torch.set_num_threads(1)
hvd.init()


@pytest.fixture(autouse=True)
def start_together():
    """A test begins when all ranks have finished the one before, and inherits nothing."""
    weighting.clear()
    hvd.barrier()
    yield
