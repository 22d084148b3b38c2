"""One unit of stage 3: parameters that are gathered together, and their state."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from zerohvd.communication.collectives import Handle
from zerohvd.communication.waiting import Waiting

SHARDED, GATHERING, GATHERED = "sharded", "gathering", "gathered"

Guard = Callable[[], AbstractContextManager[Any]]


class UnitMemory(Protocol):
    """Parameters of one unit that are sharded together: what an adapter writes for stage 3.

    A shard is kept for good. The gathered parameters have memory of their own, which is allocated
    and freed again. User code may hold on to them only in memory that is lent to it.
    """

    @property
    def params(self) -> Sequence[Any]: ...

    def gather_start(self) -> Sequence[Handle]:
        """Allocate, and start the allgather of the shards. Wait for the handles before `show`."""

    def show(self) -> None:
        """Give the parameters their gathered values."""

    def hide(self) -> None:
        """Replace the parameters by placeholders; the gathered memory stays."""

    def free(self) -> None:
        """Replace the parameters by placeholders, and free the gathered memory."""

    def free_unused(self) -> None:
        """Free the gathered memory unless the parameters are shown in it, or it is pinned."""

    def lend(self, *, keep_own: bool) -> None:
        """Show the parameters in memory that user code may keep.

        Args:
            keep_own: A pass under way refers to the gathered memory, which therefore stays.
        """

    def end_loan(self) -> None:
        """Show the parameters in the gathered memory again, with what the user has written."""

    def pin_own(self) -> None:
        """Bring the gathered memory back if `lend` has freed it: a backward pass needs it."""

    def put(self) -> None:
        """Allocate the gathered memory with this rank's shard in place: for loading."""

    def put_own(self) -> None:
        """Let this rank's part of the gathered parameters be exact, if they travel packed."""

    def make_exact(self) -> None:
        """Let all gathered parameters be exact, if they travel packed. Collective."""

    def keep(self) -> None:
        """Copy this rank's part of the gathered parameters into its shard."""

    def broadcast(self, root: int) -> None:
        """Overwrite the gathered parameters with those of rank `root`. Collective."""

    def changed(self) -> str | None:
        """Return the name of a parameter whose gathered values differ from this rank's shard."""


M = TypeVar("M", bound=UnitMemory)


@dataclasses.dataclass(eq=False)
class Use:
    """One forward pass of a unit: the clock at its start and its end.

    Attributes:
        borrowed: Other units whose parameters it has used itself.
    """

    unit: Unit[Any]
    start: int
    stop: int = 0
    borrowed: list[Any] = dataclasses.field(default_factory=list)

    @property
    def under_way(self) -> bool:
        """Whether it runs, or its backward pass does."""
        return not self.stop or self in self.unit.backward


class Unit(Generic[M]):
    """The parameters that are gathered together, and what needs them.

        SHARDED --unshard_start--> GATHERING --unshard_wait--> GATHERED --reshard--> SHARDED

    Attributes:
        parts: Memories, such as one of trainable parameters and one of frozen ones.
        depth: Forward passes that are inside.
        backward: The forward passes whose backward passes are under way.
        borrowers: Passes of other units that use its parameters.
        shown: The parameters have their values now: something needs them.
        held: How many `hold` and `open` need it.
        loans: How many `lend` need it.
        kept: Whether a graph of gradients refers to the values until the end of the step.
        gathers: How often this rank has started to gather it.
    """

    def __init__(self, name: str, number: int, guard: Guard = contextlib.nullcontext) -> None:
        """
        Args:
            number: Its place in the list of all units; the root is 0.
            guard: Makes the context in which memory is touched, whatever the user's modes are.
        """
        self.name, self.number = name, number
        self.parts: list[M] = []
        self.state = SHARDED
        self.depth = 0
        self.backward: list[Use] = []
        self.borrowers: weakref.WeakSet[Use] = weakref.WeakSet()
        self.shown = False
        self.held = 0
        self.loans = 0
        self.kept = False
        self.gathers = 0
        self._opened = 0
        self._guard = guard
        self._handles: list[Handle] = []

    @property
    def params(self) -> list[Any]:
        return [p for part in self.parts for p in part.params]

    @property
    def in_pass(self) -> bool:
        """Whether a forward or backward pass needs the gathered parameters."""
        if self.depth or self.kept or self.backward:
            return True
        return any(use.under_way for use in self.borrowers)

    @property
    def idle(self) -> bool:
        return not (self.in_pass or self.held)

    @property
    def is_open(self) -> bool:
        """Whether values are being loaded into it."""
        return bool(self._opened)

    # -- gathered and sharded ---------------------------------------------------------------------

    def unshard_start(self) -> None:
        """Start the allgather, unless the parameters are gathered or under way."""
        if self.state == SHARDED:
            self.gathers += 1
            with self._guard():
                self._handles = self._gather_start()
            self.state = GATHERING

    def unshard_wait(self, waiting: Waiting) -> None:
        """Wait for the allgather, if one is under way, and show the parameters."""
        if self.state == GATHERING:
            with self._guard():
                waiting.wait(self._handles, self)
            self._handles = []
            self.state = GATHERED
        if self.state == GATHERED and not self.shown:
            self._show()

    def unshard_finish(self) -> None:
        """Wait for the allgather, if one is under way, which every rank has started."""
        if self.state == GATHERING:
            with self._guard():
                for handle in self._handles:
                    handle.wait()
            self._handles = []
            self.state = GATHERED
            self.hide()

    def take_part(self) -> list[Handle]:
        """Start one more allgather because another rank needs it."""
        self.gathers += 1
        self.unshard_finish()  # the others are past it
        with self._guard():
            return self._gather_start()

    def end_part(self) -> None:
        """Free what `take_part` has gathered, where this rank does not need it."""
        with self._guard():
            for part in self.parts:
                part.free_unused()

    def make_exact(self) -> None:
        """Let gathered parameters, which passes may use rounded, be exact. Collective."""
        with self._guard():
            for part in self.parts:
                part.make_exact()

    def hide(self) -> None:
        """Let nothing but passes of this unit, which show them again, use the parameters.

        Other code that did would refer to memory that is freed before its backward pass.
        """
        if self.state == GATHERED:
            for part in self.parts:
                part.hide()
            self.shown = False

    def reshard(self) -> None:
        """Free the gathered parameters."""
        if self.state == GATHERED:
            for part in self.parts:
                part.free()
            self.state, self.shown = SHARDED, False

    def _gather_start(self) -> list[Handle]:
        return [handle for part in self.parts for handle in part.gather_start()]

    def _show(self) -> None:
        with self._guard():
            for part in self.parts:
                part.show()
        self.shown = True

    def begin_backward(self, use: Use) -> None:
        """Mark the unit as needed by the backward pass of `use`."""
        if use not in self.backward:
            self.backward.append(use)
        self.pin()

    def end_later(self, use: Use) -> bool:
        """End the backward passes of what ran later than `use`: they run backwards in time.

        Returns:
            Whether there were any, and they were the last.
        """
        kept = [u for u in self.backward if u.start <= use.stop]
        ended = len(kept) < len(self.backward)
        self.backward = kept
        return ended and not kept

    def pin(self) -> None:
        """Bring back the memory that a graph refers to, if it has been lent."""
        if self.state == GATHERED:
            with self._guard():
                for part in self.parts:
                    part.pin_own()

    # -- user code --------------------------------------------------------------------------------

    def lend(self) -> None:
        """Show the gathered parameters in memory that the user's views may keep."""
        if not self.loans:
            with self._guard():
                for part in self.parts:
                    part.lend(keep_own=self.in_pass)
        self.loans += 1

    def end_loan(self) -> None:
        """Undo `lend`: a unit that stays gathered keeps what has been written."""
        self.loans -= 1
        if not self.loans and self.state == GATHERED:
            with self._guard():
                for part in self.parts:
                    part.end_loan()

    # -- loading ----------------------------------------------------------------------------------

    def open(self, waiting: Waiting) -> None:
        """Let values be written into the parameters; only this rank's part is kept.

        Local: other ranks need not load. Every `open` has its `close`.
        """
        if not self._opened:
            self.unshard_wait(waiting)
            if self.state == SHARDED:
                for part in self.parts:
                    part.put()
                self.state = GATHERED
                self._show()
            else:
                for part in self.parts:
                    part.put_own()
            self.held += 1
        self._opened += 1

    def close(self) -> None:
        """Keep this rank's part of what has been written, and free the rest."""
        self._opened -= 1
        if self._opened:
            return
        for part in self.parts:
            part.keep()
        self.held -= 1
        if self.held or self.depth:
            raise RuntimeError(f"the parameters of {self.name!r} were loaded while in use")
        self.backward, self.kept = [], False
        self.reshard()

    def __repr__(self) -> str:
        return f"<unit {self.name}: {self.state}>"
