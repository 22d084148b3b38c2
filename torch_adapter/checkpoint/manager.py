"""zero.CheckpointManager: a folder of checkpoints, the newest and the best of them kept."""

from __future__ import annotations

from typing import Any

from zerohvd.checkpoint.managing import CheckpointManager as _CheckpointManager
from zerohvd.communication.rendezvous import Call
from zerohvd.torch.checkpoint import api


class CheckpointManager(_CheckpointManager):
    __doc__ = _CheckpointManager.__doc__

    _prepare = staticmethod(api.prepare_save)
    _load = staticmethod(api.load)

    def _join(self, model: Any, opt: Any) -> Any:
        return api.meet(api.owner(model, opt), Call.LOAD)
