"""zero.save and zero.load: checkpoints that any number of ranks, stage and layout can resume."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zerohvd.checkpoint import ArraySource, Content, Reader, encode, open_safetensors, together
from zerohvd.checkpoint import Plan as SavePlan
from zerohvd.checkpoint import save as save_planned
from zerohvd.checkpoint.format import absolute
from zerohvd.checkpoint.loading import read_together, states
from zerohvd.communication.rendezvous import Call
from zerohvd.torch.checkpoint import accumulation, rng, storing
from zerohvd.torch.checkpoint.holdings import Holdings, owner_of
from zerohvd.torch.checkpoint.plain_files import TORCH_SUFFIXES, open_torch_file
from zerohvd.torch.checkpoint.restoring import Plan
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
    ranks, plan = prepare_save(
        model, opt, extra, scheduler=scheduler, scaler=scaler, step=step
    )
    save_planned(folder, ranks, plan)


def prepare_save(
    model: torch.nn.Module,
    opt: ZeroOptimizer | None,
    extra: Any,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    step: int | None = None,
    metric: float | None = None,
) -> tuple[TorchCollectives | LocalCollectives, SavePlan]:
    """Bring the ranks together; returns how this one comes to its part of the checkpoint."""
    holder = owner(model, opt, "zero.save")
    ranks = meet(holder, Call.SAVE)
    found: list[Holdings] = []
    shared: dict[str, Any] = {}

    def look() -> list[int]:
        found.append(Holdings(model, holder))
        shared.update(
            extra=extra,
            schedulers=[s.state_dict() for s in _several(scheduler)],
            scaler=None if scaler is None else scaler.state_dict(),
            metric=metric,
        )
        encode(shared, "state", {}, to_array)  # what cannot be stored shows before anything is
        for section in found[0].sections:
            section.refresh_masters(section.buckets)
        return storing.buffer_sums(found[0])

    def make(buffer_sums: list[list[int]]) -> Content:
        counted = storing.training_step(opt, extra, step)
        return storing.content(
            found[0], opt, shared=shared, step=counted, buffer_sums=buffer_sums, rank=ranks.rank
        )

    return ranks, SavePlan(look, make)


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
    holder = owner(model, opt, "zero.load")
    ranks = meet(holder, Call.LOAD)
    loading: list[_Loading] = []

    def read() -> str:
        found = _Loading(folder, Holdings(model, holder), opt, ranks)
        found.plan(strict, scheduler, scaler)
        found.source.read(found.wants, ranks.rank, ranks.size)
        loading.append(found)
        return found.id

    read_together(ranks, folder, read)
    return loading[0].apply(scheduler, scaler, restore_rng=restore_rng)


def open_source(path: Path) -> tuple[Reader | ArraySource, bool]:
    """What is at `path`, and whether it is a checkpoint (or plain weights)."""
    if path.is_dir() or not path.exists():
        return Reader.open(path), True
    if path.suffix == ".safetensors":
        return open_safetensors(path), False
    if path.suffix in TORCH_SUFFIXES:
        return open_torch_file(path), False
    raise ValueError(
        f"{path} is neither a checkpoint's folder nor a file of weights: .safetensors, "
        f"{', '.join(TORCH_SUFFIXES)}"
    )


class _Loading:
    """One call of `load`, on one rank."""

    def __init__(
        self,
        path: Path,
        held: Holdings,
        opt: ZeroOptimizer | None,
        ranks: TorchCollectives | LocalCollectives,
    ) -> None:
        self.source, self.complete = open_source(path)
        self._held, self._opt, self._ranks = held, opt, ranks
        self.manifest = self.source.manifest
        self.id = self.manifest.id
        self._resumption: accumulation.Resumption | None = None
        self._state: dict[str, Any] = {}
        self._own: dict[str, Any] = {}

    @property
    def wants(self) -> list[Any]:
        more = [] if self._resumption is None else self._resumption.wants
        return self._plan.wants + more

    @property
    def _schedulers(self) -> list[Any]:
        return list(self._state.get("schedulers", []))

    def plan(self, strict: bool, scheduler: Any, scaler: Any) -> None:
        manifest, rank = self.manifest, self._ranks.rank
        if self.complete:
            assert isinstance(self.source, Reader)
            self._state, self._own = states(self.source, "torch", self._ranks, from_array)
        self._plan = Plan(self._held, self.source.tensors, strict=strict)
        size = manifest.size if self.complete else None
        self._plan.weights(self._state.get("aliases", {}), rank, size)
        self._check_others(scheduler, scaler)
        if self._opt is not None and "groups" in self._state:
            self._plan.optimizer(self._opt, self._state["groups"], manifest.values)
            stored = self._state["progress"]
            if stored is not None:
                self._resumption = accumulation.Resumption(
                    self._opt, self._held, stored, dict(self.source.tensors), manifest.size
                )

    def _check_others(self, scheduler: Any, scaler: Any) -> None:
        stored = self._schedulers
        if scheduler is not None and len(_several(scheduler)) != len(stored):
            raise ValueError(
                f"the checkpoint holds {len(stored)} schedulers, but {len(_several(scheduler))} "
                "were given: pass to load() what was passed to save()"
            )
        if scaler is not None and self._state.get("scaler") is None:
            raise ValueError("the checkpoint holds no scaler: save(..., scaler=scaler) stores it")

    def apply(self, scheduler: Any, scaler: Any, *, restore_rng: bool) -> Any:
        """Put everything into place; all ranks."""
        opt = self._held.opt
        with torch.no_grad():
            if opt is not None:
                opt.gradients.drop_all()
            self._plan.apply()
            if opt is not None:
                opt.publish()
                opt.loaded()
            else:
                torch.autograd.graph.increment_version(list(self._held.params.values()))
            if self._resumption is not None:
                self._resumption.apply(self._held)
        for path, module in self._held.modules_with_extra_state():
            if path in self._state.get("modules", {}):
                module.set_extra_state(self._state["modules"][path])
        for one, stored in zip(_several(scheduler), self._schedulers, strict=False):
            one.load_state_dict(stored)
        if scaler is not None and self._state["scaler"]:
            scaler.load_state_dict(self._state["scaler"])
        if restore_rng and "rng" in self._own:
            rng.restore(self._own["rng"])
        return self._state.get("extra")


def owner(
    model: torch.nn.Module, opt: ZeroOptimizer | None, what: str = "CheckpointManager"
) -> ZeroOptimizer | None:
    """The optimizer that holds the model's parameters, given or not."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{what}: model must be a torch.nn.Module, got {type(model).__name__}")
    if opt is not None and not isinstance(opt, ZeroOptimizer):
        raise TypeError(
            f"{what}: opt must come from zero.DistributedOptimizer or zero.zeroify, got "
            f"{type(opt).__name__}"
        )
    return owner_of(model) if opt is None else opt


def meet(opt: ZeroOptimizer | None, call: Call) -> TorchCollectives | LocalCollectives:
    """All ranks come to the same call, with nothing under way between them."""
    if opt is None:
        return join()
    opt.meet(call)
    if opt.gradients.begun:  # on all ranks alike, as they have just compared
        together(opt.collectives, "pause", lambda: accumulation.check(opt))
        accumulation.pause(opt)
    if opt.units is not None:
        opt.units.settle()
    return opt.collectives


def _several(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)
