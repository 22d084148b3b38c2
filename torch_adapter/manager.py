"""zero.CheckpointManager: a folder of checkpoints, the newest and the best of them kept."""

from __future__ import annotations

from typing import Any

from zerohvd.checkpoint.managing import CheckpointManager as _CheckpointManager
from zerohvd.torch import checkpoint
from zerohvd.torch.entry import LOAD


class CheckpointManager(_CheckpointManager):
    __doc__ = _CheckpointManager.__doc__

    _prepare = staticmethod(checkpoint.prepare_save)
    _load = staticmethod(checkpoint.load)

    def _join(self, model: Any, opt: Any) -> Any:
        return checkpoint.meet(checkpoint.owner(model, opt), LOAD)
