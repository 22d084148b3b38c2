"""zero.save and zero.load: checkpoints that any number of ranks, stage and layout can resume."""

from __future__ import annotations

import os
from typing import Any

from zerohvd.checkpoint import session
from zerohvd.checkpoint.format import absolute
from zerohvd.checkpoint.manager import checkpoint_manager
from zerohvd.checkpoint.reader import as_numpy
from zerohvd.communication.collectives import Collectives
from zerohvd.communication.rendezvous import Call
from zerohvd.keras.checkpoint.holdings import Holdings
from zerohvd.keras.checkpoint.loading import KerasTarget
from zerohvd.keras.checkpoint.saving import KerasSnapshot, to_array
from zerohvd.keras.optimizer import entry
from zerohvd.keras.optimizer.distributed import ranks_of, unwrap


def save(
    path: str | os.PathLike[str],
    model: Any,
    opt: Any = None,
    extra: Any = None,
    *,
    step: int | None = None,
) -> None:
    """Store a checkpoint in the folder `path`; all ranks must call it.

    Every rank writes what it holds, and `path` appears when all of it is on disk. What was there
    before stays loadable until then. Seeds and random number generators of all ranks are stored
    too.

    Args:
        path: The folder to make. A checkpoint of the same name is replaced.
        model: The model.
        opt: Its optimizer; that which the model was compiled with unless given.
        extra: Anything made of numbers, strings, arrays, lists and dicts, such as an epoch; that
            of rank 0 is stored.
        step: Of the training, for the manifest; default: `extra["step"]`, or the optimizer's.
    """
    folder = absolute(path)
    training = KerasTraining(model, opt, what="zero.save")
    session.save(folder, training, session.Notes(extra, step))


def load(
    path: str | os.PathLike[str],
    model: Any,
    opt: Any = None,
    *,
    strict: bool = True,
    restore_rng: bool = True,
) -> Any:
    """Load a checkpoint; all ranks must call it. Returns what `extra` was when it was saved.

    The number of ranks, the stage, the partition and the bucket size may be others than those it
    was saved with. Every rank reads what it needs. If anything is wrong with the checkpoint, all
    ranks raise the same error and nothing has been loaded.

    Args:
        path: A checkpoint; or plain weights: a .weights.h5, .keras or .safetensors file. Of these
            only the weights are loaded: the optimizer's state stays as it is.
        model: The model, built.
        opt: Its optimizer; that which the model was compiled with unless given.
        strict: Whether variables in checkpoint and model must be the same.
        restore_rng: Set the random number generators, if the number of ranks is that of the save.
    """
    folder = absolute(path)
    training = KerasTraining(model, opt, what="zero.load")
    return session.load(folder, training, strict=strict, restore_rng=restore_rng)


class CheckpointManager(checkpoint_manager.CheckpointManager):
    __doc__ = checkpoint_manager.CheckpointManager.__doc__

    def _training(self, model: Any, opt: Any, **options: Any) -> KerasTraining:
        return KerasTraining(model, opt, **options)


class KerasTraining:
    """Implements `zerohvd.checkpoint.session.Training`.

    Args:
        model: The model.
        opt: Its optimizer; None: that which the model was compiled with, if it is sharded.
        what: The user's call, for errors.
    """

    framework = "keras"
    to_array = staticmethod(to_array)
    from_array = staticmethod(as_numpy)

    def __init__(self, model: Any, opt: Any = None, *, what: str = "CheckpointManager") -> None:
        if not hasattr(model, "variables") or not hasattr(model, "built"):
            raise TypeError(f"{what}: model must be a keras.Model, got {type(model).__name__}")
        self._model = model
        self._optimizer = unwrap(opt if opt is not None else getattr(model, "optimizer", None))
        if opt is not None and self._optimizer is None:
            raise TypeError(
                f"{what}: opt must be a zero.DistributedOptimizer, got {type(opt).__name__}"
            )

    def meet(self, call: Call) -> Collectives:
        optimizer = self._optimizer
        if optimizer is not None:
            optimizer.build_loaded()
        if call in (Call.LOAD, Call.RESTORE):
            self._build()
        if optimizer is None or optimizer.step is None:
            return ranks_of(self._model)
        entry.meet(optimizer.step, call)
        if call == Call.SAVE:
            optimizer.step.settle_rounding()
        return optimizer.step.wire.eager

    def _build(self) -> None:
        """Make the optimizer's variables, which a load fills; on all ranks alike."""
        self._check_built()
        optimizer = self._optimizer
        if optimizer is not None and optimizer.step is None:
            around = getattr(self._model, "optimizer", None)
            outer = around if unwrap(around) is not None else optimizer
            outer.build(self._model.trainable_variables)

    def _check_built(self) -> None:
        if not self._model.built:
            raise ValueError("the model is not built yet: call it on a batch, or model.build()")

    def snapshot(self) -> KerasSnapshot:
        self._check_built()
        return KerasSnapshot(Holdings(self._model, self._optimizer))

    def target(self) -> KerasTarget:
        return KerasTarget(Holdings(self._model, self._optimizer))
