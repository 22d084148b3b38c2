"""Gradients between two backward passes of one step: stored, and taken up again.

A rank's own gradients, not yet reduced, are kept rank by rank; sums that have been reduced are
kept like the optimizer's state, by parameter and range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerohvd.checkpoint import Entry, TensorInfo, Want
from zerohvd.layout import Span
from zerohvd.torch.checkpoint.holdings import Holdings
from zerohvd.torch.checkpoint.tensors import destination, entry, whole_entry
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer

LOCAL, REDUCED = "grad", "grad_sum"


def check(opt: ZeroOptimizer) -> None:
    """Raise unless this is a moment at which a step can be interrupted."""
    if not opt.gradients.begun:
        return
    if opt.gradients.synchronized or not opt.gradients.rounds.more_to_come():
        raise RuntimeError(
            "the gradients of a step are complete but not applied: call opt.step() before you "
            "save or load a checkpoint"
        )
    if opt.gradients.weight is not None:
        raise RuntimeError(
            "a step with zero.weight() is under way: save or load after opt.step()"
        )


def pause(opt: ZeroOptimizer) -> None:
    """Wait until no gradient is on its way; all ranks must come here."""
    if opt.gradients.begun:
        opt.gradients.rounds.pause()


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


def local_name(name: str, rank: int) -> str:
    return f"{name}@{rank}"


def entries(opt: ZeroOptimizer, held: Holdings, rank: int) -> Iterator[Entry]:
    if not opt.gradients.begun and not opt.gradients.rounds.local:
        return
    for section in opt.sections:
        for param in section.params:
            if param.grad is not None:
                yield whole_entry(LOCAL, local_name(held.names[param], rank), param.grad)
    if opt.config.stage < 2:
        return
    for piece in held.pieces:
        shard = _reduced(opt, piece.section, piece.bucket)
        if shard is not None:
            part = shard[slice(*piece.place)]
            yield entry(REDUCED, piece.name, piece.shape, piece.span, part)


def _reduced(opt: ZeroOptimizer, section: int, bucket: int) -> torch.Tensor | None:
    if section < 0 or not opt.sections[section].reducer.has_sum(bucket):
        return None
    return opt.sections[section].reducer.shards[bucket]


class Resumption:
    """A step that was under way when a checkpoint was saved.

    Args:
        opt: The optimizer that goes on with it.
        held: Of the model.
        stored: What `progress` returned.
        tensors: Of the checkpoint.
        size: Number of ranks that saved.
    """

    def __init__(
        self,
        opt: ZeroOptimizer,
        held: Holdings,
        stored: dict[str, Any],
        tensors: dict[str, TensorInfo],
        size: int,
    ) -> None:
        self._opt, self._stored = opt, stored
        if stored["begun"] and opt.gradients.rounds.passes <= stored["done"]:
            raise ValueError(
                f"the checkpoint was saved after {stored['done']} backward passes of a step, but "
                f"backward_passes_per_step is {opt.gradients.rounds.passes}: make the optimizer "
                f"with backward_passes_per_step={stored['passes']}, as it was"
            )
        self.wants: list[Want] = []
        self._apply: list[Callable[[], None]] = []
        self._local(held, tensors, size)
        self._sums(held, tensors)

    def _local(self, held: Holdings, tensors: dict[str, TensorInfo], size: int) -> None:
        """Each rank takes its own gradients; those of ranks that are no more go to others."""
        ranks = self._opt.collectives
        mine = [r for r in range(size) if r % ranks.size == ranks.rank]
        # The reduction divides by the new number of ranks.
        scale = ranks.size / size if self._opt.gradients.average else 1.0
        for name, param in held.params.items():
            found = [f"{LOCAL}/{local_name(name, r)}" for r in mine]
            found = [key for key in found if key in tensors]
            if not found:
                continue
            grad = torch.zeros(tuple(param.shape), dtype=param.dtype, device=param.device)
            simple = len(found) == 1 and scale == 1.0
            for key in found:
                into = destination(
                    grad.view(-1), tensors[key].dtype, add=None if simple else scale
                )
                self.wants.append(Want(key, Span(0, grad.numel()), into))
            self._apply.append(lambda p=param, g=grad: setattr(p, "grad", g))

    def _sums(self, held: Holdings, tensors: dict[str, TensorInfo]) -> None:
        """Sums go to the shards; where there are none, into this rank's own gradients."""
        new: dict[Any, torch.Tensor] = {}
        for piece in held.pieces:
            key = f"{REDUCED}/{piece.name}"
            if key not in tensors or piece.section < 0:
                continue
            section = self._opt.sections[piece.section]
            if self._opt.config.stage >= 2:
                where = (piece.section, piece.bucket)
                if where not in new:
                    new[where] = section.reducer.new_sum(piece.bucket)
                into = new[where][slice(*piece.place)]
                self.wants.append(
                    Want(key, piece.span, destination(into, tensors[key].dtype))
                )
            else:
                self._own_part(held.params[piece.name], piece, tensors[key], new)
        for (number, bucket), shard in ((k, v) for k, v in new.items() if isinstance(k, tuple)):
            reducer = self._opt.sections[number].reducer
            self._apply.append(lambda r=reducer, b=bucket, s=shard: r.put_sum(b, s))

    def _own_part(
        self, param: torch.nn.Parameter, piece: Any, info: TensorInfo, new: dict[Any, torch.Tensor]
    ) -> None:
        # Averaged over the ranks again, of which the others add nothing here. At stage 0 every
        # rank has all of it, and the mean of equals is what it was.
        ranks = self._opt.collectives.size
        alone = self._opt.gradients.average and self._opt.config.stage > 0
        scale = float(ranks) if alone else 1.0
        if self._opt.config.stage == 0 and not self._opt.gradients.average:
            scale = 1.0 / ranks
        if param not in new:
            grad = new[param] = torch.zeros(
                tuple(param.shape), dtype=param.dtype, device=param.device
            )
            self._apply.append(lambda p=param, g=grad: setattr(p, "grad", g))
        into = new[param].view(-1)[piece.span.start : piece.span.stop]
        self.wants.append(
            Want(info.key, piece.span, destination(into, info.dtype, add=scale))
        )

    def apply(self, held: Holdings) -> None:
        """After the gradients have been read: the step goes on. All ranks must call it."""
        for act in self._apply:
            act()
        if self._stored["begun"]:
            self._opt.gradients.begin()
            arrived = set(self._stored["arrived"])
            self._opt.gradients.rounds.resume(
                self._stored["done"],
                [
                    {i for i, p in enumerate(section.params) if held.names[p] in arrived}
                    for section in self._opt.sections
                ],
            )
        else:
            self._opt.gradients.rounds.local = True
