"""Horovod's elastic state does not know shards: it refuses sharded optimizers."""

from __future__ import annotations

from typing import NoReturn

from horovod.torch.elastic.state import get_handler_registry

from zerohvd.errors import ShardedStateError
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer


def _refuse(optimizer: ZeroOptimizer) -> NoReturn:
    raise ShardedStateError(
        "horovod's TorchState would give one rank's state of the optimizer to all ranks after a "
        "change of their number: a sharded optimizer cannot be kept in it. Write "
        "zero.elastic.TorchState(model, opt, ...) and @zero.elastic.run, and start the job by: "
        "zerohvd run --restarts 5 -- mpirun -np ... python ..."
    )


def refuse_elastic_state() -> None:
    """Let TorchState(optimizer=...) raise; Horovod's registry is asked in order."""
    get_handler_registry().insert(0, (ZeroOptimizer, _refuse))
