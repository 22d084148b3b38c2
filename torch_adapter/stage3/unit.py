"""One unit of stage 3: parameters that are gathered together, and their state."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from zerohvd.communication.collectives import Handle
from zerohvd.communication.waiting import Waiting
from zerohvd.torch.stage3.planning import UnitPlan
from zerohvd.torch.stage3.storage import UnitFlats

SHARDED, GATHERING, GATHERED = "sharded", "gathering", "gathered"


@dataclasses.dataclass
class Use:
    """One forward pass of a unit: the clock at its start and its end."""

    start: int
    stop: int = 0


class Unit:
    """The parameters that are gathered together, and who needs them.

        SHARDED --unshard_start--> GATHERING --unshard_wait--> GATHERED --reshard--> SHARDED
    """

    def __init__(self, plan: UnitPlan, number: int) -> None:
        self.name = plan.name
        self.module = plan.module
        self.owners = plan.owners
        self.number = number
        self.parts: list[UnitFlats] = []  # trainable parameters, and frozen ones
        self.state = SHARDED
        self.depth = 0  # forward passes that are inside
        self.backward: Use | None = None  # the forward pass whose backward pass is under way
        self.held = 0  # by `gathered`, or while loading
        self.loans = 0  # `gathered` blocks of the user
        self.kept = False  # until the step: a graph of gradients refers to the values
        self.gathers = 0
        self.made = 0  # parts, ever: each has names of its own for its collectives
        self.running: list[tuple[nn.Module, Use | None]] = []  # innermost last
        self._handles: list[Handle] = []

    @property
    def in_pass(self) -> bool:
        """Whether a forward or backward pass needs the gathered parameters."""
        return bool(self.depth or self.kept) or self.backward is not None

    @property
    def idle(self) -> bool:
        return not (self.in_pass or self.held)

    def unshard_start(self) -> None:
        """Start the allgather, unless the parameters are gathered or under way."""
        if self.state == SHARDED:
            self.gathers += 1
            self._handles = [h for part in self.parts for h in part.gather_start()]
            self.state = GATHERING

    def unshard_wait(self, waiting: Waiting) -> None:
        """Wait for the allgather, if one is under way, and show the parameters."""
        if self.state == GATHERING:
            waiting.wait(self._handles, self)
            self._show()

    def take_part(self) -> list[Handle]:
        """Start one more allgather because another rank needs it."""
        self.gathers += 1
        # Another rank may be training while this one is in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if self.state == GATHERING:  # the others are past it, so it has come
                for handle in self._handles:
                    handle.wait()
                self._show()
            return [h for part in self.parts for h in part.gather_start()]

    def end_part(self) -> None:
        """Free what `take_part` has gathered, where this rank does not need it."""
        with torch.inference_mode(False), torch.no_grad():
            for part in self.parts:
                part.free_unused()

    def _show(self) -> None:
        self._handles = []
        for part in self.parts:
            part.show()
        self.state = GATHERED

    def reshard(self) -> None:
        """Free the gathered parameters."""
        if self.state == GATHERED:
            for part in self.parts:
                part.free()
            self.state = SHARDED

    # -- user code --------------------------------------------------------------------------------

    def lend(self) -> None:
        """Show the gathered parameters in memory that the user's views may keep."""
        if not self.loans:
            for part in self.parts:
                part.lend(keep_own=self.in_pass)
        self.loans += 1

    def end_loan(self) -> None:
        """Undo `lend`: a unit that stays gathered keeps what has been written."""
        self.loans -= 1
        if not self.loans and self.state == GATHERED:
            for part in self.parts:
                part.end_loan()

    def begin_backward(self, use: Use) -> None:
        """Mark the unit as needed by the backward pass of `use`."""
        self.backward = use
        if self.state == GATHERED:
            for part in self.parts:
                part.pin_own()

    # -- loading ----------------------------------------------------------------------------------

    def open(self, waiting: Waiting) -> None:
        """Let values be written into the parameters; only this rank's part is kept."""
        self.unshard_wait(waiting)
        if self.state == SHARDED:
            for part in self.parts:
                part.put()
                part.show()
            self.state = GATHERED
        self.held += 1

    def close(self) -> None:
        """Keep this rank's part of what has been written, and free the rest."""
        for part in self.parts:
            part.keep()
        self.held -= 1
        if self.held or self.depth:
            raise RuntimeError(f"the parameters of {self.name!r} were loaded while in use")
        self.backward, self.kept = None, False
        self.reshard()

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for part in self.parts for p in part.params]

    def __repr__(self) -> str:
        return f"<unit {self.name}: {self.state}>"
