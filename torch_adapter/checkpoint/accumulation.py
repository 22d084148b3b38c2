"""Gradients between two backward passes of one step: stored, and resumed.

A rank's own gradients, not reduced yet, are stored rank by rank; sums that have been reduced are
stored like the optimizer's state, by parameter and range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zerohvd.checkpoint import CheckpointMismatchError
from zerohvd.checkpoint.entries import Entry
from zerohvd.checkpoint.matching import LOCAL_GRAD, LoadPlan, Slot, check_shape, own_name
from zerohvd.checkpoint.values.document import is_integer
from zerohvd.layout import Span
from zerohvd.torch.checkpoint.holdings import HeldPiece, Holdings
from zerohvd.torch.checkpoint.tensors import entry, whole_entry
from zerohvd.torch.communication import arrays
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer

REDUCED = "grad_sum"  # kind


def check(opt: ZeroOptimizer) -> int:
    """Raise unless the step under way can be interrupted; return how many passes it has begun."""
    if opt.gradients.synchronized or not opt.gradients.rounds.more_to_come():
        raise RuntimeError(
            "the gradients of a step are complete but not applied: call opt.step() before you "
            "save or load a checkpoint"
        )
    if opt.gradients.weight is not None:
        raise RuntimeError(
            "a step with zero.weight() is under way: save or load after opt.step()"
        )
    return opt.gradients.rounds.begun()


def progress(opt: ZeroOptimizer, held: Holdings) -> dict[str, Any] | None:
    """How far the step is; None between steps."""
    if not opt.gradients.begun and not opt.gradients.rounds.local:
        return None
    return {
        "begun": opt.gradients.begun,
        "passes": opt.gradients.rounds.passes,
        "done": opt.gradients.rounds.done(),
        "arrived": [
            held.names[section.params[i]]
            for section in opt.sections
            for i in sorted(section.reducer.arrived)
        ],
    }


def local_entries(opt: ZeroOptimizer, held: Holdings, rank: int) -> Iterator[Entry]:
    """Gradients that this rank has accumulated by itself."""
    if not opt.gradients.begun and not opt.gradients.rounds.local:
        return
    for section in opt.sections:
        for index, param in enumerate(section.params):
            grad = section.local[index]
            if grad is not None:
                yield whole_entry(LOCAL_GRAD, own_name(held.names[param], rank), grad)


def reduced_entries(opt: ZeroOptimizer, held: Holdings) -> Iterator[Entry]:
    """This rank's shards of gradients that have been reduced, at stages 2 and 3."""
    if opt.config.stage < 2 or (not opt.gradients.begun and not opt.gradients.rounds.local):
        return
    for piece in held.pieces:
        if piece.section < 0 or not opt.sections[piece.section].reducer.has_sum(piece.bucket):
            continue
        shard = opt.sections[piece.section].reducer.shards[piece.bucket]
        assert shard is not None
        yield entry(REDUCED, piece.name, piece.shape, piece.span, shard[slice(*piece.place)])


def _check_progress(stored: Any) -> None:
    """Raise unless `progress` can have returned it."""
    sound = (
        isinstance(stored, Mapping)
        and isinstance(stored.get("begun"), bool)
        and all(is_integer(stored.get(k)) and stored[k] >= 0 for k in ("passes", "done"))
        and isinstance(stored.get("arrived"), list)
        and all(isinstance(name, str) for name in stored["arrived"])
    )
    if not sound:
        raise CheckpointMismatchError("state.progress of the checkpoint is not that of a step")


class Resumption:
    """A step that was under way when a checkpoint was saved.

    Args:
        opt: The optimizer that goes on with it.
        held: Of the model.
        stored: What `progress` returned.
    """

    def __init__(self, opt: ZeroOptimizer, held: Holdings, stored: Mapping[str, Any]) -> None:
        _check_progress(stored)
        self._opt, self._held, self._stored = opt, held, stored
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        if stored["begun"] and opt.gradients.rounds.passes <= stored["done"]:
            raise ValueError(
                f"the checkpoint was saved after {stored['done']} backward passes of a step, but "
                f"backward_passes_per_step is {opt.gradients.rounds.passes}: make the optimizer "
                f"with backward_passes_per_step={stored['passes']}, as it was"
            )

    def plan(self, plan: LoadPlan) -> None:
        """Ask for the gradients; they take effect with group 1 of the plan."""
        for section in self._opt.sections:
            for param in section.params:
                self._plan_local(plan, param)
        for piece in self._held.pieces if self._opt.config.stage >= 2 else ():
            info = plan.matching.find(REDUCED, piece.name)
            if info is not None and piece.section >= 0:
                check_shape(info, piece.name, piece.shape)
                dtype = arrays.dtype_name(piece.updated)
                put = self._add_to_sum(piece)
                slot = Slot(piece.name, piece.shape, piece.span, dtype, put, group=1)
                plan.fill(slot, [(info, 1.0)])

    def _plan_local(self, plan: LoadPlan, param: torch.nn.Parameter) -> None:
        """This rank's own gradient; below stage 2 also what had been reduced."""
        name, opt = self._held.names[param], self._opt
        parts = plan.matching.local_grads(name, average=opt.gradients.average)
        reduced = plan.matching.find(REDUCED, name)
        if reduced is not None and opt.config.stage < 2:
            # Every rank brings it along: the reduction makes of it what it was.
            parts.append((reduced, 1.0 if opt.gradients.average else 1.0 / opt.collectives.size))
        if not parts:
            return
        shape = tuple(param.shape)
        for info, _ in parts:
            check_shape(info, name, shape)

        def put(memory: torch.Tensor) -> None:
            param.grad = memory.view(shape).to(param.device, copy=True)

        span, dtype = Span(0, param.numel()), arrays.dtype_name(param.dtype)
        plan.fill(Slot(name, shape, span, dtype, put, group=1), parts)

    def _add_to_sum(self, piece: HeldPiece) -> Any:
        reducer = self._opt.sections[piece.section].reducer

        def put(memory: torch.Tensor) -> None:
            where = (piece.section, piece.bucket)
            if where not in self._sums:
                self._sums[where] = reducer.new_sum(piece.bucket)
                reducer.put_sum(piece.bucket, self._sums[where])
            self._sums[where][slice(*piece.place)].copy_(memory)

        return put

    def apply(self, plan: LoadPlan) -> None:
        """Go on with the step; all ranks must call it, after the parameters have been loaded."""
        plan.apply(1)
        if not self._stored["begun"]:
            self._opt.gradients.rounds.local = True
            return
        self._opt.gradients.begin()
        arrived = set(self._stored["arrived"])
        self._opt.gradients.rounds.resume(
            self._stored["done"],
            [
                {i for i, p in enumerate(section.params) if self._held.names[p] in arrived}
                for section in self._opt.sections
            ],
        )
