"""zero.save and zero.load: checkpoints that any number of ranks, stage and layout can resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from zerohvd.checkpoint import ArraySource, Content, Reader, encode, open_safetensors
from zerohvd.checkpoint import Plan as SavePlan
from zerohvd.checkpoint import save as save_planned
from zerohvd.checkpoint.format import absolute
from zerohvd.checkpoint.loading import read_together, states, training_step
from zerohvd.checkpoint.managing import CheckpointManager as _CheckpointManager
from zerohvd.communication.rendezvous import Call
from zerohvd.keras.checkpoint import storing
from zerohvd.keras.checkpoint.holdings import Holdings
from zerohvd.keras.checkpoint.plain_files import open_weights
from zerohvd.keras.checkpoint.restoring import Plan
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
    ranks, plan = prepare_save(model, opt, extra, step=step)
    save_planned(folder, ranks, plan)


def prepare_save(
    model: Any,
    opt: Any,
    extra: Any,
    *,
    step: int | None = None,
    metric: float | None = None,
) -> tuple[Any, SavePlan]:
    """Bring the ranks together; returns how this one comes to its part of the checkpoint."""
    optimizer = _optimizer(model, opt, "zero.save")
    if optimizer is not None:
        optimizer.build_loaded()
    ranks = _meet(model, optimizer, Call.SAVE)
    made: list[Holdings] = []

    def look() -> dict[str, int]:
        if not model.built:
            raise ValueError("the model is not built yet: call it on a batch, or model.build()")
        # What cannot be stored shows before anything is.
        encode({"extra": extra}, "state", {}, storing.to_array)
        made.append(Holdings(model, optimizer))
        return made[0].sums()

    def counted() -> int | None:
        return None if optimizer is None else int(np.asarray(optimizer.iterations))

    def make(sums: list[dict[str, int]]) -> Content:
        return storing.content(
            made[0],
            extra=extra,
            step=training_step(extra, step, counted),
            metric=metric,
            sums=sums,
            rank=ranks.rank,
        )

    return ranks, SavePlan(look, make)


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
    optimizer = _optimizer(model, opt, "zero.load")
    if not model.built:
        raise ValueError("the model is not built yet: call it on a batch, or model.build()")
    if optimizer is not None:
        optimizer.build_loaded()
    if optimizer is not None and optimizer.step is None:
        around = model.optimizer if unwrap(getattr(model, "optimizer", None)) else optimizer
        around.build(model.trainable_variables)
    ranks = _meet(model, optimizer, Call.LOAD)
    loading: list[_Loading] = []

    def read() -> str:
        found = _Loading(folder, Holdings(model, optimizer), ranks, strict)
        found.source.read(found.plan.wants, ranks.rank, ranks.size)
        loading.append(found)
        return found.source.manifest.id

    read_together(ranks, folder, read)
    return loading[0].apply(restore_rng=restore_rng)


def open_source(path: Path, held: Holdings) -> tuple[Reader | ArraySource, bool]:
    """What is at `path`, and whether it is a checkpoint (or plain weights)."""
    if path.is_dir() or not path.exists():
        return Reader.open(path), True
    if path.suffix == ".safetensors":
        return open_safetensors(path), False
    if path.name.endswith((".weights.h5", ".keras")):
        return open_weights(path, held.places), False
    raise ValueError(
        f"{path} is neither a checkpoint's folder nor a file of weights: .weights.h5, .keras or "
        ".safetensors"
    )


class _Loading:
    """One call of `load`, on one rank."""

    def __init__(self, path: Path, held: Holdings, ranks: Any, strict: bool) -> None:
        self.source, self.complete = open_source(path, held)
        manifest = self.source.manifest
        self._state: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        if self.complete:
            assert isinstance(self.source, Reader)
            self._state, self._own = states(self.source, "keras", ranks)
        names = self._state if self.complete else manifest.state or {}
        self.plan = Plan(
            held,
            self.source.tensors,
            names.get("weights_h5", {}),
            names.get("unplaced", []),
            rank=ranks.rank,
            size=ranks.size,
            saved_size=manifest.size if self.complete else 0,
            strict=strict,
        )
        self.plan.weights()
        if held.optimizer is not None and "scalars" in self._state:
            self.plan.optimizer(self._state["scalars"], self._state["optimizer"])

    def apply(self, *, restore_rng: bool) -> Any:
        self.plan.apply()
        if restore_rng and "rng" in self._own:
            storing.restore_generators(self._own["rng"])
        return self._state.get("extra")


def _meet(model: Any, optimizer: Any, call: Call) -> Any:
    """All ranks come to the same call; returns them."""
    if optimizer is None or optimizer.step is None:
        return ranks_of(model)
    entry.meet(optimizer.step, call)
    return optimizer.step.wire.eager


def _optimizer(model: Any, opt: Any, what: str) -> Any:
    """The DistributedOptimizer; None where the model has none."""
    if not hasattr(model, "variables") or not hasattr(model, "built"):
        raise TypeError(f"{what}: model must be a keras.Model, got {type(model).__name__}")
    found = unwrap(opt if opt is not None else getattr(model, "optimizer", None))
    if opt is not None and found is None:
        raise TypeError(
            f"{what}: opt must be a zero.DistributedOptimizer, got {type(opt).__name__}"
        )
    return found


class CheckpointManager(_CheckpointManager):
    __doc__ = _CheckpointManager.__doc__

    _prepare = staticmethod(prepare_save)
    _load = staticmethod(load)

    def _join(self, model: Any, opt: Any) -> Any:
        optimizer = _optimizer(model, opt, "CheckpointManager")
        return _meet(model, optimizer, Call.LOAD)
