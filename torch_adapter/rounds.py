"""From backward passes to collectives: which gradients leave when, in one order on all ranks.

A *round* sends every bucket once. Stages 0 and 1 add gradients up in place and make one round, in
the last backward pass of a step. Stage 2 makes a round of every pass and adds up the shards.
A step has the same number of rounds on every rank, whatever a rank has computed: what is missing
counts as zero, so a rank with unused parameters, or without a batch, keeps nobody waiting.
"""

from __future__ import annotations

import torch

from zerohvd.torch.sharding import ShardedParams


class Rounds:
    """The gradients of one step.

    Attributes:
        weight: What this rank's gradients are multiplied with on their way out.
    """

    def __init__(self, *, stage: int, passes: int) -> None:
        self._sections: list[ShardedParams] = []
        self._stage = stage
        self.passes = passes
        self._left_behind: dict[torch.nn.Parameter, tuple[torch.Tensor, int]] = {}
        self.begin_step()

    def add(self, section: ShardedParams) -> int:
        """More parameters; returns the number to report their gradients under."""
        self._sections.append(section)
        self._ready.append([])
        section.schedule.start_round(section.frozen())
        return len(self._sections) - 1

    def begin_step(self) -> None:
        self.weight = 1.0
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
            self._check_cleared(number, index)
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
        self._dispatch()

    def refuse(self, number: int, index: int) -> None:
        """Raise: one backward pass too many."""
        name = self._sections[number].named[index].name
        raise RuntimeError(
            f"the gradient of {name!r} was computed more than backward_passes_per_step="
            f"{self.passes} times before step(). To accumulate, pass "
            "backward_passes_per_step=n, or run all but the last backward pass under "
            "`with opt.no_sync():`."
        )

    def finish(self) -> None:
        """Send all that is left of the step, and wait for it."""
        for _ in range(self._done, self.passes if self._stage >= 2 else 1):
            self._finish_round()
        for section in self._sections:
            section.reducer.finish()

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
        for section, ready in zip(self._sections, self._ready, strict=True):
            section.reducer.weight = self.weight
            for bucket in ready:
                section.reducer.send(bucket)
            ready.clear()
            if not section.schedule.finished:
                return

    def end_step(self) -> None:
        """The step is over. Stage 1 leaves gradients with the model until the user clears them."""
        if self._stage == 1:
            self._left_behind = {
                p: (p.grad, p.grad._version)
                for section in self._sections
                for p in section.params
                if p.grad is not None
            }
        self.begin_step()

    def _check_cleared(self, number: int, index: int) -> None:
        """What stage 1 leaves in `.grad` is partly reduced: adding to it makes no sense."""
        section = self._sections[number]
        param = section.params[index]
        grad, version = self._left_behind.pop(param, (None, 0))
        # A backward pass that adds in place counts one version up, clearing counts another.
        if grad is not None and param.grad is grad and grad._version == version + 1:
            raise RuntimeError(
                f"the gradient of {section.named[index].name!r} was not cleared after the last "
                "step: call opt.zero_grad() before each step's first backward()"
            )
