"""The reduced gradients of this rank's pieces, and what all ranks must know of them together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from zerohvd.numerics import finish_norm
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.gradients.section import Section


class ReducedGrads:
    """The gradients the inner optimizer is about to use.

    Args:
        sections: Looked at anew in every call: more may be added to the list.
        collectives: Joins the ranks that share the gradients.
        prefix: Of the names of collectives.
        replicated: Every rank holds all gradients, as at stage 0.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        collectives: TorchCollectives | LocalCollectives,
        prefix: str,
        *,
        replicated: bool,
    ) -> None:
        self._sections = sections
        self._collectives = collectives
        self._prefix = prefix
        self._replicated = replicated

    def grads(self) -> Iterator[torch.Tensor]:
        for section in self._sections:
            for owned in section.owned:
                if owned.tensor.grad is not None:
                    yield owned.tensor.grad

    def clear(self) -> None:
        for section in self._sections:
            for owned in section.owned:
                owned.tensor.grad = None

    def divide_by_weights(self, weight: float) -> None:
        """Turn sums of weighted gradients into their mean; `weight` is this rank's."""
        total = self._agree(weight, "sum", "weights")
        if total == 0.0:
            raise ValueError("every rank gave weight 0: there is no sample to learn from")
        # The reducer has divided by the number of ranks already.
        scale = self._collectives.size / total
        for section in self._sections:
            for shard in section.reducer.shards:
                if shard is not None:
                    shard.mul_(scale)

    def global_norm(self, p: float) -> float:
        """The p-norm of the gradients of all ranks, each element counted once."""
        norms = [torch.linalg.vector_norm(g, p, dtype=_at_least_float32(g)) for g in self.grads()]
        values = [n.item() for n in norms]
        if math.isinf(p):
            local, op = max(values, default=0.0), "max"
        else:
            local, op = math.fsum(v**p for v in values), "sum"
        return finish_norm(local if self._replicated else self._agree(local, op, "norm"), p)

    def spread_overflow(self, sentinel: torch.nn.Parameter) -> bool:
        """Let every rank see a gradient that is not finite, wherever its piece lies.

        GradScaler looks at this rank's gradients alone, then decides whether to step and how to
        change the scale. Ranks that saw different things would part for ever; so a rank that
        has none gets one. `sentinel` is what a rank shows that owns no piece.
        """
        grads = list(self.grads())
        finite = all(bool(torch.isfinite(g.sum()) or torch.isfinite(g).all()) for g in grads)
        overflow = bool(self._agree(0.0 if finite else 1.0, "max", "overflow"))
        if overflow and finite:
            for grad in [*grads, sentinel.grad]:
                assert grad is not None
                grad.view(-1)[:1] = math.inf
        return overflow

    def _agree(self, value: float, op: str, what: str) -> float:
        agreed = torch.tensor([value], dtype=torch.float64)
        self._collectives.allreduce_start(agreed, op, name=f"{self._prefix}/{what}").wait()
        return agreed.item()


def _at_least_float32(grad: torch.Tensor) -> torch.dtype:
    return torch.float64 if grad.dtype == torch.float64 else torch.float32
