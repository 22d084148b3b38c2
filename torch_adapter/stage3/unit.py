"""One unit of stage 3: parameters that are gathered together, and whether they are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerohvd.communication.collectives import Handle
from zerohvd.communication.waiting import Waiting
from zerohvd.torch.stage3.planning import UnitPlan
from zerohvd.torch.stage3.storage import UnitFlats

if TYPE_CHECKING:
    from zerohvd.torch.stage3.units import Units

SHARDED, COMING, WHOLE = "sharded", "coming", "whole"


@dataclasses.dataclass
class Use:
    """One forward pass of a unit, in the order of all of them."""

    start: int
    stop: int = 0


class Unit:
    """The parameters that are gathered together, and whether they are."""

    def __init__(self, plan: UnitPlan, number: int) -> None:
        self.name = plan.name
        self.module = plan.module
        self.owners = plan.owners
        self.number = number
        self.parts: list[UnitFlats] = []  # trainable parameters, and frozen ones
        self.state = SHARDED
        self.depth = 0  # forward passes that are inside
        self.backward: Use | None = None  # the pass whose backward pass is under way
        self.held = 0  # by `gathered`, or while loading
        self.awaited: set[nn.Parameter] = set()  # whose gradients the backward pass has not made
        self.kept = False  # until the step: a graph of gradients refers to the values
        self.gathers = 0
        self.made = 0  # parts, ever: each has names of its own for its collectives
        self.running: list[tuple[nn.Module, Use | None]] = []  # innermost last
        self._handles: list[Handle] = []

    @property
    def idle(self) -> bool:
        return not (self.depth or self.held or self.kept) and self.backward is None

    def start(self) -> None:
        """Start the gather, unless the parameters are there or on their way."""
        if self.state == SHARDED:
            self.gathers += 1
            self._handles = [h for part in self.parts for h in part.gather_start()]
            self.state = COMING

    def finish(self, waiting: Waiting) -> None:
        """Have the parameters."""
        if self.state == COMING:
            waiting.wait(self._handles, self)
            self._show()

    def take_part(self) -> list[Handle]:
        """One more gather, for another rank's sake."""
        if self.state == COMING:  # the others are past it, so it has come
            for handle in self._handles:
                handle.wait()
            with torch.inference_mode(False), torch.no_grad():
                self._show()
        self.gathers += 1
        # Another rank may be training while this one is in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return [h for part in self.parts for h in part.gather_start()]

    def end_part(self) -> None:
        """What `take_part` has gathered is not needed here."""
        if self.state == SHARDED:
            with torch.inference_mode(False), torch.no_grad():
                for part in self.parts:
                    part.free()

    def _show(self) -> None:
        self._handles = []
        for part in self.parts:
            part.show()
        self.state = WHOLE

    def free(self) -> None:
        if self.state == WHOLE:
            for part in self.parts:
                part.free()
            self.state = SHARDED

    def free_if_through(self) -> bool:
        """Free it in the middle of a backward pass, if that will not come back to it."""
        through = self.state == WHOLE and not (self.depth or self.held or self.kept)
        if not through or any(part.is_referred_to() for part in self.parts):
            return False
        self.backward = None
        self.free()
        return True

    def open(self, units: Units) -> None:
        """Let values be written into the parameters; only this rank's part is kept."""
        self.finish(units.waiting)
        if self.state == SHARDED:
            for part in self.parts:
                part.put()
                part.show()
            self.state = WHOLE
        self.held += 1

    def close(self, units: Units) -> None:
        """Keep this rank's part of what has been written. The rest may be what it wants."""
        for part in self.parts:
            part.keep()
        self.held -= 1
        if self.held or self.depth:
            raise RuntimeError(f"the parameters of {self.name!r} were loaded while in use")
        self.backward, self.kept = None, False
        self.free()

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for part in self.parts for p in part.params]

    def __repr__(self) -> str:
        return f"<unit {self.name}: {self.state}>"
