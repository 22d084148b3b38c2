"""From backward passes to collectives: which gradients leave when, in one order on all ranks.

A *round* sends every bucket once. Stages 0 and 1 add gradients up in place and make one round, in
the last backward pass of a step. Stage 2 makes a round of every pass and adds up the shards.
A step has the same number of rounds on every rank, whatever a rank has computed: what is missing
counts as zero, so a rank with unused parameters, or without a batch, keeps nobody waiting.
"""

from __future__ import annotations

import torch

from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.params.section import ShardedParams

# Seconds that a backward pass waits for other ranks, once a step, before it goes on without.
PATIENCE = 2.0


class Rounds:
    """The gradients of one step.

    Attributes:
        weight: What this rank's gradients are multiplied with on their way out.
    """

    def __init__(
        self,
        collectives: TorchCollectives | LocalCollectives,
        *,
        stage: int,
        passes: int,
        prefix: str,
    ) -> None:
        self._collectives = collectives
        self._name = f"{prefix}/order"
        self._sections: list[ShardedParams] = []
        self._order: list[int] = []  # in which sections are sent
        self._seen: list[int] | None = []  # in which they were complete; None: the order is known
        self._stage = stage
        self.passes = passes
        self.begin_step()

    def add(self, section: ShardedParams) -> int:
        """More parameters; returns the number to report their gradients under."""
        self._sections.append(section)
        self._ready.append([])
        self._order.append(len(self._order))
        self._seen = []
        section.schedule.start_round(section.frozen())
        return len(self._sections) - 1

    def begin_step(self) -> None:
        self.local = False  # passes under no_sync() have left gradients with the parameters
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
        """Parameters may have been frozen since the last step: do not wait for those."""
        if not any(section.schedule.started for section in self._sections):
            self._begin_round()

    def arrived(self, number: int, index: int) -> None:
        """A backward pass has added to the gradient of a parameter."""
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
        """A pass under no_sync() has added to the gradient: it must not be under way already."""
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
        name = self._sections[number].named[index].name
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
        """From the first step on, sections are sent in the order in which the first rank had them
        complete: a head, for one, long before the embedding that is in the same unit."""
        if self._seen is None or len(self._order) < 2:
            return
        # Twice in several passes; not at all where a section is not used.
        order = list(dict.fromkeys([*self._seen, *self._order]))
        said = torch.tensor([len(self._seen), *order])
        if isinstance(self._collectives, TorchCollectives):
            self._collectives.broadcast_in_place(said, name=self._name)
        seen, *self._order = said.tolist()
        self._seen = None if seen else []

    # -- between two passes ------------------------------------------------------------------------

    def done(self) -> int:
        """How many backward passes of this step have been counted."""
        return self._done if self._stage >= 2 else max(self._counts.values(), default=0)

    def more_to_come(self) -> bool:
        """Whether another backward pass belongs to this step."""
        under_way = self._stage >= 2 and any(s.schedule.started for s in self._sections)
        return self.done() + under_way < self.passes

    def pause(self) -> None:
        """Finish the pass, and wait for what is under way; all ranks must come here."""
        if self._stage < 2:
            return  # nothing leaves before the last pass
        if any(section.schedule.started for section in self._sections):
            self._finish_round()
        for section in self._sections:
            section.reducer.finish()

    def resume(self, done: int, arrived: list[set[int]]) -> None:
        """Go on in a step of which `done` passes lie behind; `arrived` as in the reducers."""
        self._done = done if self._stage >= 2 else 0
        for number, indices in enumerate(arrived):
            self._sections[number].reducer.arrived = set(indices)
            if self._stage < 2:
                members = range(len(self._sections[number].params))
                self._counts.update({(number, index): done for index in members})

    def _finish_round(self) -> None:
        for section, ready in zip(self._sections, self._ready, strict=True):
            # Gradients that no hook has handed over: of passes under no_sync(), of parameters
            # that were used in fewer passes than others.
            for index, param in enumerate(section.params):
                if param.grad is not None and not section.schedule.has_seen(index):
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
            # Full gradients of two sections, which are units at stage 3, are under way at most.
            for earlier in self._order[: place - 1] if ready and place > 1 else ():
                if not self._sections[earlier].reducer.settle(self._patience):
                    self._patience = 0.0
            while ready:
                # With enough buckets under way, wait for the other ranks, which keeps memory low;
                # but a rank that does not come within our patience is elsewhere, so stop waiting.
                if not section.reducer.has_room(ready[0], self._patience):
                    self._patience = 0.0
                section.reducer.send(ready.pop(0))
            if not section.schedule.finished:
                return


def check_passes(passes: int) -> int:
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise ValueError(
            f"backward_passes_per_step must be a whole number of at least 1, got {passes!r}"
        )
    return passes
