"""ZeRO for PyTorch under Horovod.

    import horovod.torch as hvd
    import zerohvd.torch as zero

    hvd.init()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    opt = zero.DistributedOptimizer(opt, named_parameters=model.named_parameters(), stage=2)

Every name of horovod.torch that is not here is Horovod's own, so that a Horovod script becomes a
sharded one by its import: `import zerohvd.torch as hvd`.
"""

if __name__ != "zerohvd.torch":
    raise ImportError(f"import zerohvd.torch, not {__name__}: a second copy would share no state")

import os
from typing import Any

from zerohvd.launchers import allow_single_process, spare_fusion_buffers
from zerohvd.limits import name_missing_ranks
from zerohvd.rank_count import warn_of_lonely_ranks
from zerohvd.versions import require_torch

require_torch()
allow_single_process(os.environ)
spare_fusion_buffers(os.environ)
name_missing_ranks(os.environ)
warn_of_lonely_ranks(os.environ)

from zerohvd.checkpoint import CheckpointError, CorruptCheckpointError  # noqa: E402
from zerohvd.communication.weighting import weight  # noqa: E402
from zerohvd.errors import (  # noqa: E402
    DisagreementError,
    NonFiniteError,
    ShardedStateError,
    WaitTimeoutError,
    ZeroError,
)
from zerohvd.torch.checkpoint import elastic  # noqa: E402
from zerohvd.torch.checkpoint.api import CheckpointManager, load, save  # noqa: E402
from zerohvd.torch.checkpoint.preempting import preemption  # noqa: E402
from zerohvd.torch.communication import joining  # noqa: E402
from zerohvd.torch.communication.packed.compression import Compression  # noqa: E402
from zerohvd.torch.communication.threads import settle  # noqa: E402
from zerohvd.torch.data import DistributedSampler, even_steps  # noqa: E402
from zerohvd.torch.monitoring.monitor import Monitor  # noqa: E402
from zerohvd.torch.monitoring.report import communication_report, memory_report  # noqa: E402
from zerohvd.torch.optimizer.distributed import DistributedOptimizer  # noqa: E402
from zerohvd.torch.optimizer.elastic import refuse_elastic_state  # noqa: E402
from zerohvd.torch.optimizer.plan import plan  # noqa: E402
from zerohvd.torch.optimizer.scaler import GradScaler  # noqa: E402
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer  # noqa: E402
from zerohvd.torch.optimizer.zeroify import zeroify  # noqa: E402
from zerohvd.torch.stage3.deferred import deferred_init  # noqa: E402
from zerohvd.torch.stage3.gathered import gathered  # noqa: E402

settle()
refuse_elastic_state()
joining.register()

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "Compression",
    "CorruptCheckpointError",
    "DisagreementError",
    "DistributedOptimizer",
    "DistributedSampler",
    "GradScaler",
    "Monitor",
    "NonFiniteError",
    "ShardedStateError",
    "WaitTimeoutError",
    "ZeroError",
    "ZeroOptimizer",
    "communication_report",
    "deferred_init",
    "elastic",
    "even_steps",
    "gathered",
    "load",
    "memory_report",
    "plan",
    "preemption",
    "save",
    "weight",
    "zeroify",
]


def __getattr__(name: str) -> Any:
    import horovod.torch as plain

    try:
        return getattr(plain, name)
    except AttributeError:
        raise AttributeError(
            f"neither zerohvd.torch nor horovod.torch has {name!r}"
        ) from None
