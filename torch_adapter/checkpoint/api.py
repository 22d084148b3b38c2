"""zero.save and zero.load: checkpoints that any number of ranks, stage and layout can resume."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from zerohvd.checkpoint import session, together
from zerohvd.checkpoint.format import absolute
from zerohvd.checkpoint.manager import checkpoint_manager
from zerohvd.communication.rendezvous import Call
from zerohvd.torch.checkpoint import accumulation
from zerohvd.torch.checkpoint.holdings import Holdings, optimizer_of
from zerohvd.torch.checkpoint.loading import TorchTarget
from zerohvd.torch.checkpoint.saving import TorchSnapshot
from zerohvd.torch.checkpoint.tensors import from_array, to_array
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives, join
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer


def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    opt: ZeroOptimizer | None = None,
    extra: Any = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    step: int | None = None,
) -> None:
    """Store a checkpoint in the folder `path`; all ranks must call it.

    Every rank writes what it holds, and `path` appears when all of it is on disk. What was there
    before stays loadable until then. The random number generators of all ranks are stored too.

    Args:
        path: The folder to make. A checkpoint of the same name is replaced.
        model: The model: parameters, buffers, extra state.
        opt: Its sharded optimizer; without it, only the model is stored.
        extra: Anything made of numbers, strings, arrays, tensors, lists and dicts, such as an
            epoch, or what a sampler's state_dict() returns; that of rank 0 is stored.
        scheduler: A learning rate scheduler, or several in a list.
        scaler: A GradScaler.
        step: Of the training, for the manifest; default: `extra["step"]`, or the optimizer's.
    """
    folder = absolute(path)
    training = TorchTraining(model, opt, scheduler, scaler, what="zero.save")
    session.save(folder, training, session.Notes(extra, step))


def load(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    opt: ZeroOptimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    strict: bool = True,
    restore_rng: bool = True,
) -> Any:
    """Load a checkpoint; all ranks must call it. Returns what `extra` was when it was saved.

    The number of ranks, the stage, the partition and the bucket size may be others than those it
    was saved with. Every rank reads what it needs. If anything is wrong with the checkpoint, all
    ranks raise the same error and nothing has been loaded.

    Args:
        path: A checkpoint; or plain weights: a .safetensors file, or a state_dict in a .pt, .pth
            or .bin file. These have no optimizer state: it stays as it is.
        model: The model.
        opt: Its sharded optimizer; without it, only the model is loaded.
        scheduler: As given to `save`; a list of the same length.
        scaler: As given to `save`.
        strict: Whether the names in checkpoint and model must be the same.
        restore_rng: Set the random number generators, if the number of ranks is that of the save.
    """
    folder = absolute(path)
    training = TorchTraining(model, opt, scheduler, scaler, what="zero.load")
    return session.load(folder, training, strict=strict, restore_rng=restore_rng)


class CheckpointManager(checkpoint_manager.CheckpointManager):
    __doc__ = checkpoint_manager.CheckpointManager.__doc__

    def _training(self, model: Any, opt: Any, **options: Any) -> TorchTraining:
        return TorchTraining(model, opt, **options)


class TorchTraining:
    """Implements `zerohvd.checkpoint.session.Training`.

    Args:
        model: The model.
        opt: Its optimizer; None: only the model is stored or loaded.
        scheduler: One, several, or None.
        scaler: A GradScaler, or None.
        what: The user's call, for errors.
    """

    framework = "torch"
    to_array = staticmethod(to_array)
    from_array = staticmethod(from_array)

    def __init__(
        self,
        model: torch.nn.Module,
        opt: ZeroOptimizer | None,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        what: str = "CheckpointManager",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"{what}: model must be a torch.nn.Module, got {type(model).__name__}")
        if opt is not None and not isinstance(opt, ZeroOptimizer):
            raise TypeError(
                f"{what}: opt must come from zero.DistributedOptimizer or zero.zeroify, got "
                f"{type(opt).__name__}"
            )
        self._model, self._opt = model, opt
        self._schedulers, self._scaler = _several(scheduler), scaler
        self._holder = optimizer_of(model) if opt is None else opt

    def meet(self, call: Call) -> TorchCollectives | LocalCollectives:
        opt = self._holder
        if opt is None:
            return join()
        opt.meet(call)
        if opt.gradients.begun:  # on all ranks alike, as they have just compared
            _, begun = together(opt.collectives, "pause", lambda: accumulation.check(opt))
            opt.gradients.rounds.pause(max(begun))
        if opt.units is not None:
            opt.units.settle()
        if call is Call.SAVE:
            opt.settle_rounding()
        return opt.collectives

    def snapshot(self) -> TorchSnapshot:
        given = {
            "schedulers": [s.state_dict() for s in self._schedulers or ()],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }
        return TorchSnapshot(Holdings(self._model, self._holder), self._opt, given)

    def target(self) -> TorchTarget:
        held = Holdings(self._model, self._holder)
        return TorchTarget(held, self._opt, self._schedulers, self._scaler)



def _several(value: Any) -> Sequence[Any] | None:
    if value is None:
        return None
    return value if isinstance(value, (list, tuple)) else (value,)
