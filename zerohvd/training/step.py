"""The gradients of a step, from the first one that arrives to the update: what ranks agree on.

A step *begins* with the first gradient of a backward pass, or with `step()` on a rank that had no
batch; it is *synchronized* when this rank's pieces hold the reduced gradients, and *ends* when they
have been applied or dropped.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from zerohvd import limits
from zerohvd.communication import weighting
from zerohvd.communication.collectives import AsyncCollectives
from zerohvd.communication.rendezvous import Call, Rendezvous
from zerohvd.communication.rounds import Reducer, Rounds, Section
from zerohvd.numerics import finish_norm, local_norm, local_norms


class Param(Protocol):
    """A parameter of the model."""

    requires_grad: bool


class HasGroups(Protocol):
    """An optimizer: per group of parameters, its options."""

    param_groups: list[dict[str, Any]]


class HasLoads(Protocol):
    """A sharded model: knows how often its state has been loaded."""

    loads: int


class MustAgree:
    """What must be the same on all ranks in every step, as this rank sees it now.

    Holds no reference to the sharded optimizer: a cycle would keep one that was deleted alive until
    the garbage collector runs, and its parameters would still belong to it.

    Attributes:
        loads: How often the optimizer's state has been loaded.
        monitored: Steps per record of a Monitor; 0: there is none.
    """

    def __init__(
        self, groups: Sequence[Sequence[Param]], inner: HasGroups, model: HasLoads | None
    ) -> None:
        self._groups, self._inner, self._model = groups, inner, model
        self.loads = 0
        self.monitored = 0

    def trainable(self) -> Iterator[bool]:
        """Per parameter, whether it requires a gradient."""
        return (param.requires_grad for group in self._groups for param in group)

    def all_loads(self) -> int:
        """How often the state of the optimizer or of the model has been loaded."""
        return self.loads + (0 if self._model is None else self._model.loads)

    def options(self) -> str:
        """What would let the ranks drift apart if it differed."""
        rates = [g.get("lr") for g in self._inner.param_groups]
        return repr([self.all_loads(), [r for r in rates if isinstance(r, float)]])


class StepReducer(Reducer, Protocol):
    """Owns the gradients of a section from arrival to reduced shard."""

    def drop_full(self) -> None:
        """Drop full gradients that are partly reduced by now."""

    def release(self) -> None:
        """Drop the gradients."""


class StepSection(Section, Protocol):
    """Parameters with one Layout."""

    @property
    def reducer(self) -> StepReducer: ...

    @property
    def buckets(self) -> range: ...

    def set_piece_grads(self, buckets: range) -> None:
        """Give each piece in these buckets its reduced gradient."""


S = TypeVar("S", bound=StepSection)


class GradientStep(abc.ABC, Generic[S]):
    """The gradients of an optimizer; an adapter adds what touches tensors.

    Attributes:
        sections: The parameters, in the order in which they were added.
        begun: The other ranks have been told that a step is under way.
        synchronized: The pieces hold the reduced gradients of the step.
        average: Gradients are averaged over the ranks; else they are summed.
        rounds: Which gradients leave when.
    """

    def __init__(
        self,
        collectives: AsyncCollectives,
        rendezvous: Rendezvous,
        agreed: MustAgree,
        *,
        rounds: Rounds,
        prefix: str,
        average: bool,
        before_rest: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            rendezvous: Where ranks compare what they are about to do.
            agreed: What they compare.
            rounds: Which gradients leave when.
            prefix: Of the names of collectives.
            average: Whether gradients are averaged over the ranks.
            before_rest: Called when all ranks have come to the end of a step, before they send what
                is left of it.
        """
        self.sections: list[S] = []
        self.average, self.rounds = average, rounds
        self._collectives, self._prefix = collectives, prefix
        self._rendezvous, self._agreed, self._before_rest = rendezvous, agreed, before_rest
        self._weights = weighting.StepWeights()
        self._accumulate_only = False
        self._log_is_stale = False
        self.reset()

    def reset(self) -> None:
        """Forget the step."""
        self.begun = False
        self.synchronized = False

    @property
    def weight(self) -> float | None:
        """How much this rank counts in the step; None: as much as any other."""
        return self._weights.value

    # -- arrival -----------------------------------------------------------------------------------

    def arrived(self, section: int, index: int) -> None:
        """A backward pass has added to the gradient of a parameter."""
        if self.synchronized:
            self.rounds.refuse(section, index)
        if not self.begun:
            self.release()
        if self._accumulate_only:
            self.rounds.accumulated(section, index)
            return
        self.begin()
        self._weights.check_unchanged()
        self.rounds.arrived(section, index)

    def begin(self) -> None:
        """Tell the other ranks that a step is under way, once; does not wait for them."""
        if self.begun:
            return
        self.begun = True
        self.renew_log()
        if self._weights.begin() is not None and not self.average:
            raise ValueError(weighting.NEEDS_AVERAGE)
        self.rounds.weight = self.weight
        self.rounds.notice_frozen()
        self._rendezvous.open(
            Call.STEP,
            self._agreed.trainable(),
            weighted=self.weight is not None,
            passes=self.rounds.passes,
            options=self._agreed.options(),
            monitored=self._agreed.monitored,
        )

    def renew_log(self) -> None:
        """Start the log of collectives anew, if nothing has been moved since the last step."""
        if self._log_is_stale:
            self._collectives.log.reset()
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
        self._weights.give(value)

    @property
    def weight_waits(self) -> bool:
        """Whether a weight has been announced for a step that has not begun."""
        return self._weights.waits

    def use_up_weight(self) -> None:
        """The step has failed: what was announced for it must not count for another one."""
        self._weights.use_up()

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

    @limits.during(Call.STEP.said)
    def send_rest(self) -> None:
        """Send all that has not left yet; all ranks must call it."""
        self.begin()
        self._weights.check_unchanged()
        self._rendezvous.check()  # before waiting for buckets that other ranks may never send
        if self._before_rest is not None:
            self._before_rest()
        self.rounds.send_rest()

    @limits.during(Call.STEP.said)
    def await_reduced(self) -> None:
        """Give this rank's pieces the reduced gradients, after `send_rest`."""
        for section in self.sections:
            section.reducer.finish()
            section.reducer.drop_full()
        self.synchronized = True
        if self.weight is not None:
            total = self.agree(self.weight, "sum", "weights")
            if total == 0.0:
                raise ValueError("every rank gave weight 0: there is no sample to learn from")
            # The reducer has divided by the number of ranks already.
            self.scale_sums(self._collectives.size / total)
        for section in self.sections:
            section.set_piece_grads(section.buckets)

    @abc.abstractmethod
    def scale_sums(self, factor: float) -> None:
        """Multiply the reduced gradients."""

    # -- numbers of all ranks ----------------------------------------------------------------------

    @limits.during(Call.STEP.said)
    def agree(self, value: float, op: str, what: str) -> float:
        """Combine a number of every rank; all ranks must call it."""
        return self._agree([value], op, what)[0]

    def _agree(self, values: Sequence[float], op: str, what: str) -> list[float]:
        c = self._collectives
        agreed = c.from_numpy(np.array(values, np.float64))
        c.allreduce_start(agreed, op, name=f"{self._prefix}/{what}").wait()
        return [float(value) for value in c.to_numpy(agreed)]

    def joint_norm(self, norms: Sequence[float], p: float, *, replicated: bool) -> float:
        """The p-norm of the gradients of all ranks, from the norms of this rank's.

        Args:
            replicated: Every rank holds all gradients: each element counts once.
        """
        local, op = local_norm(norms, p)
        return finish_norm(local if replicated else self.agree(local, op, "norm"), p)

    def meet(self, call: Call) -> None:
        """Return when all ranks have made the same call; raise on all of them otherwise."""
        self._rendezvous.check()  # of a step under way
        self._rendezvous.open(call, self._agreed.trainable(), options=self._agreed.options())
        self._rendezvous.check()

    def joint_norms(
        self, norms: Iterable[tuple[int, float]], length: int, p: float, *, replicated: bool
    ) -> list[float]:
        """The same for each of `length` parameters, from (parameter, norm of a part of it)."""
        totals, op = local_norms(norms, length, p), local_norm([], p)[1]
        self.meet(Call.NORM)
        if not replicated:
            totals = self._agree(totals, op, "norms")
        return [finish_norm(total, p) for total in totals]

    # -- the end of a step -------------------------------------------------------------------------

    def end(self) -> None:
        """Forget the gradients that have been reduced: they are applied, or not wanted."""
        self.rounds.begin_step()
        self._weights.end()
        self.reset()
        self._log_is_stale = True

    def release(self) -> None:
        """Drop the reduced gradients of all sections."""
        for section in self.sections:
            section.reducer.release()
