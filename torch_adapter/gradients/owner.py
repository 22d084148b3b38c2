"""The gradients of an optimizer: one owner from their arrival to this rank's reduced shards.

A step *begins* with the first gradient of a backward pass, or with `step()` on a rank that had no
batch; it is *synchronized* when this rank's pieces hold the reduced gradients, and *ends* when they
have been applied or dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from zerohvd.communication import weighting
from zerohvd.communication.rendezvous import Call, Rendezvous
from zerohvd.communication.rounds import Rounds
from zerohvd.numerics import clip_factor
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.gradients.hooks import GradHooks
from zerohvd.torch.gradients.reduced import ReducedGrads
from zerohvd.torch.gradients.section import Section


class MustAgree:
    """What must be the same on all ranks in every step, as this rank sees it now.

    Holds no reference to the optimizer: a cycle would keep one that was deleted alive until the
    garbage collector runs, and its parameters would still belong to it.

    Attributes:
        loads: How often the optimizer's state has been loaded.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.nn.Parameter]],
        inner: torch.optim.Optimizer,
        model: HasLoads | None,
    ) -> None:
        self._groups, self._inner, self._model = groups, inner, model
        self.loads = 0

    def trainable(self) -> Iterator[bool]:
        """Per parameter, whether it requires a gradient."""
        return (param.requires_grad for group in self._groups for param in group)

    def options(self) -> str:
        """What would let the ranks drift apart if it differed."""
        rates = [g.get("lr") for g in self._inner.param_groups]
        loads = self.loads + (0 if self._model is None else self._model.loads)
        return repr([loads, [r for r in rates if isinstance(r, float)]])


class HasLoads(Protocol):
    """A sharded model: knows how often its state has been loaded."""

    loads: int


class Gradients:
    """Takes gradients as backward passes make them, reduces them, and gives pieces theirs.

    Attributes:
        sections: The parameters, in the order in which they were added.
        begun: The other ranks have been told that a step is under way.
        synchronized: The pieces hold the reduced gradients of the step.
        weight: How much this rank counts in the step; None: as much as any other.
        clipped: The reduced gradients have been clipped.
        average: Gradients are averaged over the ranks; else they are summed.
        rounds: Which gradients leave when.
        sentinel: What GradScaler sees of a rank that owns no piece: one element that never changes.
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
        """
        Args:
            rendezvous: Where ranks compare what they are about to do.
            agreed: What they compare.
            stage: Of ZeRO.
            passes: Backward passes per step.
            prefix: Of the names of collectives.
            average: Whether gradients are averaged over the ranks.
            before_rest: Called when all ranks have come to the end of a step, before they send what
                is left of it.
        """
        self.sections: list[Section] = []
        self.average = average
        self._rendezvous, self._agreed, self._before_rest = rendezvous, agreed, before_rest
        self.rounds = Rounds(collectives, stage=stage, passes=passes, prefix=prefix)
        self._reduced = ReducedGrads(self.sections, collectives, prefix, replicated=stage == 0)
        self._hooks: list[GradHooks] = []
        self._accumulate_only = False
        self._log, self._log_is_stale = collectives.log, False
        self.sentinel = torch.nn.Parameter(torch.zeros(1))
        self._reset()

    def add(self, section: Section) -> None:
        """Take the gradients of more parameters."""
        number = self.rounds.add(section)
        self.sections.append(section)
        self._hooks.append(GradHooks(section.params, self, number))

    def close(self) -> None:
        """Let go of the parameters."""
        for hooks in self._hooks:
            hooks.remove()
        for section in self.sections:
            section.reducer.release()

    def _reset(self) -> None:
        self.begun = False
        self.synchronized = False
        self.weight: float | None = None
        self.clipped = False
        self._overflow: bool | None = None  # agreed by all ranks; None: nobody has asked

    # -- arrival -----------------------------------------------------------------------------------

    def arrived(self, section: int, index: int) -> None:
        """A backward pass has added to the gradient of a parameter."""
        if self.synchronized:
            self.rounds.refuse(section, index)
        if not self.begun:
            for each in self.sections:
                each.reducer.release()
        if self._accumulate_only:
            self.rounds.accumulated(section, index)
            return
        self.begin()
        weighting.check_unchanged(self.weight)
        self.rounds.arrived(section, index)

    def begin(self) -> None:
        """Tell the other ranks that a step is under way, once; does not wait for them."""
        if self.begun:
            return
        self.begun = True
        self.renew_log()
        self.weight = weighting.announced()
        if self.weight is not None and not self.average:
            raise ValueError(weighting.NEEDS_AVERAGE)
        self.rounds.weight = self.weight
        self.rounds.notice_frozen()
        self._rendezvous.open(
            Call.STEP,
            self._agreed.trainable(),
            weighted=self.weight is not None,
            passes=self.rounds.passes,
            options=self._agreed.options(),
        )

    def renew_log(self) -> None:
        """Start the log of collectives anew, if nothing has been moved since the last step."""
        if self._log_is_stale:
            self._log.reset()
            self._log_is_stale = False

    def announce(self, weight: float) -> None:
        """Say how much this rank counts; gradients must not have left yet."""
        value = weighting.check_weight(weight)
        if self.begun and self.weight != value:
            raise ValueError(
                f"step(weight={weight!r}) came after gradients had left without it. Say "
                "zero.weight(n) before the backward pass, or run the backward pass under "
                "`with opt.no_sync():`"
            )
        weighting.weight(value)

    def compare_and_restart(self) -> None:
        """Wait for the other ranks to begin the same step, then let it begin anew: parameters are
        about to be added to it."""
        self.begin()
        self._rendezvous.check()
        self.begun = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to the full gradients; nothing is moved."""
        before, self._accumulate_only = self._accumulate_only, True
        try:
            yield
        finally:
            self._accumulate_only = before

    # -- reduction ---------------------------------------------------------------------------------

    def send_rest(self) -> None:
        """Send all that has not left yet; all ranks must call it."""
        self.begin()
        weighting.check_unchanged(self.weight)
        self._rendezvous.check()  # before waiting for buckets that other ranks may never send
        if self._before_rest is not None:
            self._before_rest()
        self.rounds.send_rest()

    def await_reduced(self) -> None:
        """Give this rank's pieces the reduced gradients, after `send_rest`."""
        for section in self.sections:
            section.reducer.finish()
            section.reducer.drop_full()
        self.synchronized = True
        if self.weight is not None:
            self._reduced.divide_by_weights(self.weight)
        for section in self.sections:
            section.set_piece_grads(section.buckets)
            section.reducer.show_to_user()
        self.sentinel.grad = torch.zeros(1)

    def norm(self, p: float) -> float:
        """The p-norm of the reduced gradients of all ranks together."""
        return self._reduced.global_norm(p)

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale the reduced gradients, which have this norm, to at most `max_norm`."""
        self.clipped = True
        factor = clip_factor(norm, max_norm)
        if factor < 1.0:
            for grad in self._reduced.grads():
                grad.mul_(factor)

    def agree_on_overflow(self) -> bool:
        """Whether a reduced gradient of any rank is not finite; every rank then has one."""
        if self._overflow is None:
            self._overflow = self._reduced.spread_overflow(self.sentinel)
        return self._overflow

    # -- the end of a step -------------------------------------------------------------------------

    def end(self) -> None:
        """Forget the gradients that have been reduced: they are applied, or not wanted."""
        self._reduced.clear()
        self.rounds.begin_step()
        self._reset()
        self._log_is_stale = True

    def end_skipped(self) -> None:
        """`end`, if the ranks have agreed on an overflow and not applied the gradients."""
        if self.synchronized and self._overflow:
            self.end()

    def drop_all(self) -> None:
        """Forget every gradient, reduced or not."""
        self.end()
        self.release()
        for section in self.sections:
            for param in section.params:
                param.grad = None

    def release(self) -> None:
        """Drop the reduced gradients of all sections."""
        for section in self.sections:
            section.reducer.release()
