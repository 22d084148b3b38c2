"""From backward passes to collectives: which gradients leave when, in one order on all ranks.

A *round* sends every bucket once. Stages 0 and 1 add gradients up in place and make one round, in
the last backward pass of a step. Stage 2 makes a round of every pass and adds up the shards.
A step has the same number of rounds on every rank, whatever a rank has computed: what is missing
counts as zero, so a rank with unused parameters, or without a batch, keeps nobody waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np

from zerohvd.communication.collectives import Collectives
from zerohvd.schedule import Schedule

# Seconds that a backward pass waits for other ranks, once a step, before it goes on without.
PATIENCE = 2.0


class Reducer(Protocol):
    """Owns the gradients of a section from arrival to reduced shard.

    Attributes:
        weight: What this rank's gradients are multiplied with on their way out.
        arrived: The parameters that had a gradient in this step.
    """

    weight: float | None
    arrived: set[int]

    def begin_step(self) -> None:
        """Forget the last step: the next result replaces the shard, later ones add to it."""

    def take(self, index: int) -> None:
        """Take over the finished gradient of a parameter."""

    def has_room(self, b: int, patience: float) -> bool:
        """Whether bucket `b` may go now; waits for earlier ones, but not beyond `patience`."""

    def settle(self, patience: float) -> bool:
        """Wait for all in flight, but not beyond `patience`; return whether nothing is left."""

    def send(self, b: int) -> None:
        """Start the reduction of a bucket; gradients that never came count as zero."""

    def finish(self) -> None:
        """Wait until everything in flight has been reduced."""


class Section(Protocol):
    """Parameters with one Layout."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def reducer(self) -> Reducer: ...

    @property
    def param_names(self) -> Collection[str]:
        """In the order of the Layout."""

    def frozen(self) -> Collection[int]:
        """The parameters that require no gradient now."""

    def with_gradient(self) -> Iterable[int]:
        """The parameters that hold a gradient which the reducer has not taken."""


class Rounds:
    """The gradients of one step.

    Attributes:
        weight: What this rank's gradients are multiplied with on their way out.
        local: Passes under no_sync() have left gradients with the parameters.
    """

    def __init__(self, collectives: Collectives, *, stage: int, passes: int, prefix: str) -> None:
        self._collectives = collectives
        self._name = f"{prefix}/order"
        self._sections: list[Section] = []
        self._order: list[int] = []  # in which sections are sent
        self._seen: list[int] | None = []  # in which they were complete; None: the order is known
        self._stage = stage
        self.passes = passes
        self.begin_step()

    def add(self, section: Section) -> int:
        """Add a section; return the number to report its gradients under."""
        self._sections.append(section)
        self._ready.append([])
        self._order.append(len(self._order))
        self._seen = []
        section.schedule.start_round(section.frozen())
        return len(self._sections) - 1

    def begin_step(self) -> None:
        self.local = False
        self.weight: float | None = None
        self._patience = PATIENCE
        self._done = 0
        self._counts: dict[tuple[int, int], int] = {}
        self._ready: list[list[int]] = [[] for _ in self._sections]
        for section in self._sections:
            section.reducer.begin_step()
        self._begin_round()

    def _begin_round(self) -> None:
        for section in self._sections:
            section.schedule.start_round(section.frozen())

    def notice_frozen(self) -> None:
        """Do not wait for parameters that have been frozen since the last step."""
        if not any(section.schedule.started for section in self._sections):
            self._begin_round()

    def arrived(self, number: int, index: int) -> None:
        """A backward pass has added to the gradient of parameter `index` of section `number`."""
        if self._stage < 2:
            count = self._counts[number, index] = self._counts.get((number, index), 0) + 1
            if count > self.passes:
                self.refuse(number, index)
            if count < self.passes:
                return
        elif self._sections[number].schedule.has_seen(index):
            if self._done + 1 >= self.passes:
                self.refuse(number, index)
            self._finish_round()
        section = self._sections[number]
        section.reducer.take(index)
        self._ready[number].extend(section.schedule.ready(index))
        if self._seen is not None and section.schedule.finished:
            self._seen.append(number)
        self._dispatch()

    def accumulated(self, number: int, index: int) -> None:
        """A pass under no_sync() has added to the gradient: it must not be in flight already."""
        self.local = True
        if self._stage < 2:
            gone = self._counts.get((number, index), 0) >= self.passes
        else:
            gone = self._done + 1 >= self.passes
            gone = gone and self._sections[number].schedule.has_seen(index)
        if gone:
            self.refuse(number, index)

    def refuse(self, number: int, index: int) -> None:
        """Raise: one backward pass too many."""
        name = list(self._sections[number].param_names)[index]
        raise RuntimeError(
            f"the gradient of {name!r} was computed more than backward_passes_per_step="
            f"{self.passes} times before step(). To accumulate, pass "
            "backward_passes_per_step=n, or run all but the last backward pass under "
            "`with opt.no_sync():`."
        )

    def send_rest(self) -> None:
        """Send all that is left of the step."""
        for _ in range(self._done, self.passes if self._stage >= 2 else 1):
            self._finish_round()
        self._learn_order()

    def _learn_order(self) -> None:
        """Send sections in the order in which rank 0 had them complete, from the next step on: a
        head, for one, long before the embedding that is in the same unit."""
        if self._seen is None or len(self._order) < 2:
            return
        # Twice in several passes; not at all where a section is not used.
        order = list(dict.fromkeys([*self._seen, *self._order]))
        c = self._collectives
        own = np.array([len(self._seen), *order], np.int64)
        said = c.to_numpy(c.broadcast(c.from_numpy(own), name=self._name))
        seen, *self._order = said.tolist()
        self._seen = None if seen else []

    # -- between two passes ------------------------------------------------------------------------

    def done(self) -> int:
        """How many backward passes of this step have been counted."""
        return self._done if self._stage >= 2 else max(self._counts.values(), default=0)

    def begun(self) -> int:
        """How many backward passes of this step have been counted or are under way."""
        under_way = self._stage >= 2 and any(s.schedule.started for s in self._sections)
        return self.done() + under_way

    def more_to_come(self) -> bool:
        """Whether another backward pass belongs to this step."""
        return self.begun() < self.passes

    def pause(self, passes: int) -> None:
        """Finish this many passes, and wait for what is in flight; all ranks must come here.

        Args:
            passes: The most that any rank has begun: one that has run fewer of them sends zeros,
                or the others would wait for it.
        """
        if self._stage < 2:
            return  # nothing leaves before the last pass
        while self._done < passes:
            self._finish_round()
        for section in self._sections:
            section.reducer.finish()

    def resume(self, done: int, arrived: Collection[Collection[int]]) -> None:
        """Continue a step of which `done` passes lie behind; `arrived` as in the reducers."""
        self._done = done if self._stage >= 2 else 0
        for number, indices in enumerate(arrived):
            self._sections[number].reducer.arrived = set(indices)
            if self._stage < 2:
                members = range(len(self._sections[number].param_names))
                self._counts.update({(number, index): done for index in members})

    def _finish_round(self) -> None:
        for section, ready in zip(self._sections, self._ready, strict=True):
            # Gradients that no hook has handed over: of passes under no_sync(), of parameters
            # that were used in fewer passes than others.
            for index in section.with_gradient():
                if not section.schedule.has_seen(index):
                    section.reducer.take(index)
            ready.extend(section.schedule.flush())
        self._dispatch()
        self._done += 1
        self._begin_round()

    def _dispatch(self) -> None:
        """Send what is ready, section after section: one order for all ranks."""
        for place, number in enumerate(self._order):
            section, ready = self._sections[number], self._ready[number]
            section.reducer.weight = self.weight
            # Full gradients of two sections, which are units at stage 3, are in flight at most.
            for earlier in self._order[: place - 1] if ready and place > 1 else ():
                if not self._sections[earlier].reducer.settle(self._patience):
                    self._patience = 0.0
            while ready:
                # With enough buckets in flight, wait for the other ranks, which keeps memory low;
                # but a rank that does not come within the patience is elsewhere: stop waiting.
                if not section.reducer.has_room(ready[0], self._patience):
                    self._patience = 0.0
                section.reducer.send(ready.pop(0))
            if not section.schedule.finished:
                return


def check_passes(passes: int) -> int:
    """Return `passes`; raise ValueError unless it is a whole number of at least 1."""
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise ValueError(
            f"backward_passes_per_step must be a whole number of at least 1, got {passes!r}"
        )
    return passes
