"""The gradients of an optimizer: one owner from their arrival to this rank's reduced shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from zerohvd.communication import weighting
from zerohvd.communication.rendezvous import Rendezvous
from zerohvd.communication.rounds import Rounds
from zerohvd.numerics import clip_factor
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.gradients.hooks import GradHooks
from zerohvd.torch.gradients.section import Section
from zerohvd.training.step import GradientStep, MustAgree


class Gradients(GradientStep[Section]):
    """Takes gradients as backward passes make them, reduces them, and gives pieces theirs.

    Attributes:
        clipped: The reduced gradients have been clipped.
        sentinel: What GradScaler sees of a rank whose pieces have no gradient: one element that
            never changes.
    """

    def __init__(
        self,
        collectives: TorchCollectives | LocalCollectives,
        rendezvous: Rendezvous,
        agreed: MustAgree,
        *,
        stage: int,
        passes: int,
        prefix: str,
        average: bool,
        before_rest: Callable[[], None] | None = None,
    ) -> None:
        """See `GradientStep`; `stage` is that of ZeRO, `passes` the backward passes per step."""
        self._replicated = stage == 0
        self._hooks: list[GradHooks] = []
        self.sentinel = torch.nn.Parameter(torch.zeros(1))
        super().__init__(
            collectives,
            rendezvous,
            agreed,
            rounds=Rounds(collectives, stage=stage, passes=passes, prefix=prefix),
            prefix=prefix,
            average=average,
            before_rest=before_rest,
        )

    def add(self, section: Section) -> None:
        """Take the gradients of more parameters."""
        number = self.rounds.add(section)
        self.sections.append(section)
        self._hooks.append(GradHooks(section.params, self, number))

    def close(self) -> None:
        """Let go of the parameters."""
        for hooks in self._hooks:
            hooks.remove()
        self.release()

    def reset(self) -> None:
        super().reset()
        self.clipped = False
        self._overflow: bool | None = None  # agreed by all ranks; None: nobody has asked

    def arrived(self, section: int, index: int) -> None:
        self.end_skipped()  # an overflow was seen by unscale_(), and step() was not called
        super().arrived(section, index)

    # -- the reduced gradients of this rank's pieces -----------------------------------------------

    def await_reduced(self) -> None:
        super().await_reduced()
        for section in self.sections:
            section.reducer.show_to_user()
        self.sentinel.grad = torch.zeros(1)

    def scale_sums(self, factor: float) -> None:
        for section in self.sections:
            for shard in section.reducer.shards:
                if shard is not None:
                    shard.mul_(factor)

    def _reduced(self) -> Iterator[torch.Tensor]:
        for section in self.sections:
            for owned in section.owned:
                if owned.tensor.grad is not None:
                    yield owned.tensor.grad

    def any_reduced(self) -> bool:
        """Whether a piece of this rank has a reduced gradient."""
        return next(self._reduced(), None) is not None

    def norm(self, p: float) -> float:
        """The p-norm of the reduced gradients of all ranks together."""
        norms = [torch.linalg.vector_norm(g, p, dtype=_wide(g)) for g in self._reduced()]
        return self.joint_norm([n.item() for n in norms], p, replicated=self._replicated)

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale the reduced gradients, which have this norm, to at most `max_norm`."""
        self.clipped = True
        factor = clip_factor(norm, max_norm)
        if factor < 1.0:
            for grad in self._reduced():
                grad.mul_(factor)

    def agree_on_overflow(self) -> bool:
        """Whether a reduced gradient of any rank is not finite; every rank then has one.

        GradScaler looks at this rank's gradients alone, then decides whether to step and how to
        change the scale. Ranks that saw different things would diverge; so a rank that has none
        gets one, in the sentinel if its pieces have no gradient.
        """
        if self._overflow is None:
            grads = list(self._reduced())
            finite = all(bool(torch.isfinite(g.sum()) or torch.isfinite(g).all()) for g in grads)
            self._overflow = bool(self.agree(0.0 if finite else 1.0, "max", "overflow"))
            if self._overflow and finite:
                for grad in [*grads, self.sentinel.grad]:
                    assert grad is not None
                    grad.view(-1)[:1] = math.inf
        return self._overflow

    # -- the end of a step -------------------------------------------------------------------------

    def end(self) -> None:
        for section in self.sections:
            for owned in section.owned:
                owned.tensor.grad = None
        super().end()

    def end_skipped(self) -> None:
        """`end`, if the ranks have agreed on an overflow and not applied the gradients."""
        if self.synchronized and self._overflow:
            self.end()
            weighting.clear()  # as step() does: the weight was that of this step

    def drop_all(self) -> None:
        """Forget every gradient, reduced or not."""
        self.end()
        self.release()
        for section in self.sections:
            for param in section.params:
                param.grad = None


def _wide(grad: torch.Tensor) -> torch.dtype:
    """float32 or better: 16-bit sums of squares overflow."""
    return torch.float64 if grad.dtype == torch.float64 else torch.float32
