"""The gradients of an optimizer: one owner from their arrival to this rank's reduced shards."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator

import torch

from zerohvd.communication import weighting
from zerohvd.communication.rendezvous import Rendezvous
from zerohvd.communication.rounds import Rounds
from zerohvd.numerics import check_norm_type, clip_factor
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.gradients import stand_in
from zerohvd.torch.gradients.hooks import GradHooks
from zerohvd.torch.gradients.section import Section
from zerohvd.torch.params.owned import OwnedPiece
from zerohvd.training.step import GradientStep, MustAgree


class Gradients(GradientStep[Section]):
    """Takes gradients as backward passes make them, reduces them, and gives pieces theirs.

    Attributes:
        sentinel: What GradScaler sees of a rank whose pieces have no gradient: one element that
            never changes.
        norm_seen: Of the gradients of the latest step before they were clipped; None: nobody has
            asked.
        replicated: Every rank has all reduced gradients.
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
        synchronize: Callable[[], None],
    ) -> None:
        """See `GradientStep`; `stage` is that of ZeRO, `passes` the backward passes per step.

        Args:
            synchronize: Waits for the reduction, when a user looks at gradients before.
        """
        self._stage, self._replicated = stage, stage == 0
        self.norm_seen: float | None = None
        self._synchronize = synchronize
        self._hooks: list[GradHooks] = []
        self.sentinel = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        super().__init__(
            collectives,
            rendezvous,
            agreed,
            rounds=Rounds(collectives, stage=stage, passes=passes, prefix=prefix),
            prefix=prefix,
            average=average,
            before_rest=before_rest,
        )
        weighting.tell(self.weight_was_announced)

    @property
    def replicated(self) -> bool:
        return self._replicated

    def begin(self) -> None:
        if not self.begun:
            self.norm_seen = None
        super().begin()

    def add(self, section: Section) -> None:
        """Take the gradients of more parameters."""
        number = self.rounds.add(section)
        section.local.stand_for(lambda param, index: stand_in.make(param, self, number, index))
        self.sections.append(section)
        self._hooks.append(GradHooks(section.params, self, number))
        # An optimizer that is deleted in the middle of a step leaves nothing in the model.
        weakref.finalize(self, stand_in.clear, section.params).atexit = False

    def close(self) -> None:
        """Let go of the parameters."""
        for hooks in self._hooks:
            hooks.remove()
        for section in self.sections:
            section.local.end()
        self.release()

    def reset(self) -> None:
        super().reset()
        self._hidden = False  # `param.grad` of all parameters stands for the reduced gradient
        self._norms: dict[float, list[list[float]]] = {}  # by p, section, parameter
        self._overflow: bool | None = None  # agreed by all ranks; None: nobody has asked

    def expected(self, section: int, index: int) -> None:
        """Autograd is about to add to a gradient: to the real one."""
        if self._hidden:
            self.end_skipped()  # an overflow was seen by unscale_(), and step() was not called
            self.sections[section].local.show(index)

    def arrived(self, section: int, index: int) -> None:
        if self.synchronized:
            self.end_skipped()
        if self._hidden and not self.begun:
            self._show_all()  # what a weight of 0 has hidden, in case the user has cleared some
        super().arrived(section, index)
        if self._hidden:
            self.sections[section].local.hide(index)
        elif self.begun and (self._stage >= 2 or not self.rounds.more_to_come()):
            self._hide_all()

    def weight_was_announced(self, value: float) -> None:
        """A rank that has no batch sees gradients too: those that the other ranks clip."""
        if value == 0 and not self.begun:
            self._hide_all()

    def _hide_all(self) -> None:
        """Let `param.grad` stand for the reduced gradients: of all parameters, or ranks that have
        used others would not see the same."""
        self._hidden = True
        for section in self.sections:
            section.local.hide_all()
            section.show_shares(on_their_way=True)

    def _show_all(self) -> None:
        self._hidden = False
        for section in self.sections:
            section.local.end()
            section.show_shares(on_their_way=False)

    def cleared(self) -> None:
        """The user clears gradients before a step has begun."""
        if self._hidden and not self.begun:
            self._show_all()

    # -- the reduced gradients of this rank's pieces -----------------------------------------------

    def await_reduced(self) -> None:
        super().await_reduced()
        for section in self.sections:
            section.reducer.show_to_user()
            if self._replicated and not any(m is not None for m in section.masters):
                section.local.publish()
        self.sentinel.grad = torch.zeros(1, device="cpu")

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
        found = self.joint_norm([n.item() for n in norms], p, replicated=self._replicated)
        self._note_norm(found, p)
        return found

    def _note_norm(self, norm: float, p: float) -> None:
        if p == 2.0 and self.norm_seen is None:
            self.norm_seen = norm

    def square(self) -> float | None:
        """The sum of the squares of this rank's gradients; None: it has dropped them."""
        shards = [g for s in self.sections for g in s.reducer.shards]
        if shards and all(g is None for g in shards):
            return None
        norms = [torch.linalg.vector_norm(g, dtype=_wide(g)) for g in shards if g is not None]
        return math.fsum(n.item() ** 2 for n in norms)

    def norm_of_shards(self, p: float) -> float:
        """The same, also when the gradients have been applied and not been dropped."""
        shards = [g for s in self.sections for g in s.reducer.shards]
        if shards and all(g is None for g in shards):
            raise RuntimeError(
                "there are no gradients now: call grad_norm() between backward() and the next "
                "zero_grad()"
            )
        present = [g for g in shards if g is not None and g.numel()]
        norms = [torch.linalg.vector_norm(g, p, dtype=_wide(g)).item() for g in present]
        return self.joint_norm(norms, p, replicated=self._replicated)

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale the reduced gradients, which have this norm, to at most `max_norm`."""
        factor = clip_factor(norm, max_norm)
        if factor < 1.0:
            self._norms.clear()
            for grad in self._reduced():
                grad.mul_(factor)

    # -- what `param.grad` stands for, see stand_in.py ---------------------------------------------

    def name_of(self, section: int, index: int) -> str:
        return self.sections[section].named[index].name

    def full_of(self, section: int, index: int) -> torch.Tensor | None:
        self._await_for_user(section, index)
        local = self.sections[section].local
        return local[index] if local.published else None

    def norm_of(self, section: int, index: int, p: float) -> float:
        self._await_for_user(section, index)
        if p not in self._norms:
            self._norms[p] = self._norms_of_all(check_norm_type(p))
        return self._norms[p][section][index]

    def change(self, section: int, index: int, change: Callable[[OwnedPiece], None]) -> None:
        self._await_for_user(section, index)
        self._norms.clear()
        for owned in self.sections[section].owned:
            if owned.piece.param == index and owned.tensor.grad is not None:
                change(owned)

    def _await_for_user(self, section: int, index: int) -> None:
        if self.synchronized:
            return
        if not self.begun and not self.weight_waits:
            raise RuntimeError(
                f"the gradient of {self.name_of(section, index)!r} belongs to a step that is over: "
                "read param.grad anew after each backward pass"
            )
        if self.begun and self.rounds.more_to_come():
            raise RuntimeError(
                f"the gradient of {self.name_of(section, index)!r} was read or changed after "
                f"{self.rounds.begun()} of backward_passes_per_step={self.rounds.passes} backward "
                "passes, when a part of it had been reduced. Clip, or look at gradients, once per "
                "step, after the last of its backward passes"
            )
        self._synchronize()

    def _norms_of_all(self, p: float) -> list[list[float]]:
        """The p-norm of every parameter's reduced gradient, by section."""
        found: list[tuple[int, torch.Tensor]] = []
        starts = [0, *itertools.accumulate(len(s.params) for s in self.sections)]
        for start, section in zip(starts, self.sections, strict=False):
            for owned in section.owned:
                grad = owned.tensor.grad
                if grad is not None and grad.numel():
                    norm = torch.linalg.vector_norm(grad, p, dtype=_wide(grad))
                    found.append((start + owned.piece.param, norm))
        local = [(index, norm.item()) for index, norm in found]
        norms = self.joint_norms(local, starts[-1], p, replicated=self._replicated)
        self._note_norm(math.sqrt(math.fsum(n * n for n in norms)), p)
        return [norms[a:b] for a, b in itertools.pairwise(starts)]

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
            if self._overflow:
                self.forget_errors()  # what has travelled of them is not going to be applied
            if self._overflow and finite:
                self._norms.clear()
                for grad in [*grads, self.sentinel.grad]:
                    assert grad is not None
                    grad.view(-1)[:1] = math.inf
        return self._overflow

    def forget_errors(self) -> None:
        """Drop what has not travelled of the gradients of earlier steps."""
        for section in self.sections:
            section.reducer.forget_errors()

    # -- the end of a step -------------------------------------------------------------------------

    def end(self) -> None:
        for section in self.sections:
            section.show_shares(on_their_way=False)
            section.local.end()
        super().end()

    def end_skipped(self) -> bool:
        """`end`, if the ranks have agreed on an overflow and not applied the gradients; return
        whether they have."""
        skipped = self.synchronized and bool(self._overflow)
        if skipped:
            self.end()
        return skipped

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
