"""zero.elastic: training that goes on after ranks have been lost."""

from __future__ import annotations

from typing import Any

import torch
from horovod.common.elastic import notification_manager

from zerohvd.elastic.copies import LostStateError
from zerohvd.elastic.reset import Notices
from zerohvd.elastic.state import ElasticState, run
from zerohvd.torch.checkpoint.api import CheckpointManager, TorchTraining
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer

__all__ = ["LostStateError", "TorchState", "run"]


def _listen(notices: Notices) -> None:
    notification_manager.init()
    notification_manager.register_listener(notices)


class TorchState(ElasticState):
    """A training that is committed to memory, and goes on from there; see `zero.elastic.run`.

        state = zero.elastic.TorchState(model, opt, scheduler=scheduler, step=0)

    Args:
        model: The model: parameters, buffers, extra state.
        opt: Its sharded optimizer, of any stage.
        sampler: A `zero.DistributedSampler`, or anything with state_dict() and load_state_dict().
        scheduler: A learning rate scheduler, or several in a list.
        scaler: A GradScaler.
        checkpoints: A CheckpointManager, whose newest checkpoint is loaded where no commit is
            left; save with `extra=state.values()`.
        **values: First values of attributes: numbers, strings, arrays, lists, dicts. They are
            committed too; those of rank 0.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        opt: ZeroOptimizer | None = None,
        *,
        sampler: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        checkpoints: CheckpointManager | None = None,
        **values: Any,
    ) -> None:
        def training() -> TorchTraining:
            return TorchTraining(model, opt, scheduler, scaler, what="zero.elastic.TorchState")

        def from_disk() -> Any:
            assert checkpoints is not None
            return checkpoints.restore(model, opt, scheduler=scheduler, scaler=scaler)

        training()  # raises here, not at the first commit
        disk = from_disk if checkpoints is not None else None
        super().__init__(training, sampler, disk, values, _listen)
