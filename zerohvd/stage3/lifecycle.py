"""Stage 3: a unit's parameters are gathered before they are used, and freed after.

    forward   root  u0 ......... u1 ......... u2 .........
    gathered  root  u0           u1           u2
    on the way      u1 .....     u2 .....
    backward                                  u2 ......... u1 ......... u0 ......... root

A unit is resharded when the next one begins, so two units at most are gathered at a time: the one
that runs and the one that is prefetched. Units that lie in each other run together, and count as
one. The last two of a forward pass stay for the backward pass, which begins with them. The root is
gathered from its forward pass to the end of the backward pass.

A module may use a parameter of another unit itself, such as a head that multiplies by the weight of
an embedding. Its unit borrows the other one: that is gathered too until the forward pass which uses
it ends, and again during the backward pass of that.

An adapter says when passes begin and end, and gives every unit its memory (`unit.UnitMemory`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from zerohvd.communication.agreement import any_rank
from zerohvd.communication.collectives import AsyncCollectives
from zerohvd.communication.waiting import Timing, Waiting
from zerohvd.errors import DisagreementError
from zerohvd.stage3.prefetch import Order
from zerohvd.stage3.unit import GATHERED, GATHERING, Guard, Unit, Use

U = TypeVar("U", bound=Unit[Any])

FAILED_ELSEWHERE = (
    "another rank has raised an error inside zero.gathered(): see there. What was written inside "
    "is not kept, on any rank"
)


class UnitLifecycle(Generic[U]):
    """All units of a model: which are gathered, and which is prefetched next.

    Attributes:
        all: Every unit, in model order; the root is the first.
        waiting: Through which all waits of the model go, so that none is a deadlock.
        loads: How often values were loaded into units.
        on_gather: Called before a pass gathers a unit.
    """

    def __init__(
        self,
        units: Sequence[U],
        collectives: AsyncCollectives,
        prefix: str,
        *,
        reshard_after_forward: bool = True,
        guard: Guard = contextlib.nullcontext,
        timing: Timing | None = None,
    ) -> None:
        """
        Args:
            units: All units, the root first.
            prefix: Of the names of collectives.
            reshard_after_forward: Free a unit's parameters between its forward and backward pass.
            guard: As for `Unit`.
        """
        self.all = units
        self.root = units[0]
        self.prefix = prefix
        self.waiting = Waiting(units, collectives, prefix, timing)
        self.loads = 0
        self.on_gather: Callable[[], None] | None = None
        self._collectives = collectives
        self._reshard_after_forward = reshard_after_forward
        self._guard = guard
        self._forward: Order[U] = Order()
        self._backward: Order[U] = Order()
        self._clock = 0
        self._running: list[Use] = []  # forward passes that are inside; innermost last
        # The backward pass that runs, as a borrower; `end_backward` will be called.
        self._backward_use: Use | None = None

    # -- forward ----------------------------------------------------------------------------------

    def begin_forward(self, unit: U, *, recomputed: bool = False, recorded: bool = True) -> Use:
        """Gather a unit that is about to run. If this raises, there is nothing to end.

        Args:
            recomputed: It runs inside a backward pass, which needs its activations again.
            recorded: A backward pass through it may follow.
        """
        if not recomputed:
            self._forget_backward()
        if unit is self.root and not unit.depth and not recomputed:
            self._forward.restart()
        self._make_room(unit, recomputed=recomputed, recorded=recorded)
        unit.depth += 1
        use = Use(unit, self._tick())
        try:
            self._unshard(unit, self._backward if recomputed else self._forward)
        except BaseException:
            unit.depth -= 1
            raise
        self._running.append(use)
        return use

    def end_forward(
        self, unit: U, use: Use, *, last_use: bool, escaping: Iterable[U] = ()
    ) -> None:
        """Note that a unit has run, or has failed to.

        Args:
            last_use: No backward pass will come through what it has returned.
            escaping: Units of which it has returned views.
        """
        unit.depth -= 1
        use.stop = self._tick()
        self._running.remove(use)
        around = self._innermost()
        if around is not None:
            for returned in escaping:
                self._lend_to(around, returned)
        for other in (unit, *use.borrowed):
            # After the whole model the user may go on with what the root has.
            if other is not self.root and other.idle:
                other.hide()
        if unit is self.root and not unit.depth and last_use:
            self.reshard_idle()

    def borrow(self, unit: U, *, recomputed: bool = False, recorded: bool = True) -> bool:
        """Gather a unit whose parameters the pass that runs now uses itself, until that ends.

        Returns:
            Whether a pass runs.
        """
        use = self._innermost()
        if use is None:
            return False
        self._make_room(unit, recomputed=recomputed, recorded=recorded)
        self._lend_to(use, unit)
        self._unshard(unit, self._backward if recomputed else self._forward)
        return True

    def _innermost(self) -> Use | None:
        """The pass that runs now; what is recomputed outside of modules is of the backward pass."""
        return self._running[-1] if self._running else self._backward_use

    def _lend_to(self, use: Use, unit: U) -> None:
        if unit not in use.borrowed:
            use.borrowed.append(unit)
        unit.borrowers.add(use)

    def _make_room(self, unit: U, *, recomputed: bool, recorded: bool) -> None:
        """Reshard what nothing needs before a unit is gathered."""
        # The backward pass begins with the last unit; the one before it comes next there.
        last = recorded and not recomputed and self._forward.is_last(unit)
        if self._reshard_after_forward and (not last or self._idle((GATHERING,), unit)):
            for other in self._idle((GATHERED,), unit):
                other.reshard()

    def _unshard(self, unit: U, order: Order[U]) -> None:
        """Gather the unit, and prefetch the one that came next in the pass before."""
        if self.on_gather is not None:
            self.on_gather()
        following = order.after(unit)
        unit.unshard_start()
        if following is not None and self._has_room_for(following, unit):
            following.unshard_start()
        unit.unshard_wait(self.waiting)

    def _has_room_for(self, following: U, unit: U) -> bool:
        """Whether there is no third one: two units at most are gathered or under way."""
        counted = (GATHERING, GATHERED) if self._reshard_after_forward else (GATHERING,)
        return not self._idle(counted, following, unit)

    def _idle(self, states: Collection[str], *but: U) -> list[U]:
        """Units in these states that nothing needs now, without the root and without `but`."""
        return [u for u in self.all[1:] if u.state in states and u.idle and u not in but]

    # -- backward ---------------------------------------------------------------------------------

    def starts_backward(self) -> bool:
        """Note that a backward pass runs; return whether it has just begun.

        Then the adapter has to call `end_backward` at its end.
        """
        if self._backward_use is not None:
            return False
        self._backward_use = Use(self.root, self._tick())
        self._backward.restart()
        return True

    def begin_backward(self, unit: U, use: Use, *, again: bool = False) -> None:
        """Gather a unit whose backward pass begins: gradients of its outputs have come.

        Args:
            use: The forward pass that had these outputs.
            again: There will be a backward pass of this one.
        """
        if use in unit.backward and unit.state == GATHERED:
            return
        if unit is not self.root and not again:
            soon = self._backward.expected(unit, 2)  # the root may come in between
            for other in self.all[1:]:
                wanted = other in use.borrowed or (other in soon and not other.backward)
                if other is not unit and other.state == GATHERED and not wanted:
                    self._reshard_if_done(other, use)
            unit.end_later(use)  # passes of its own
        unit.begin_backward(use)
        unit.kept = unit.kept or again
        for other in use.borrowed:
            other.kept = other.kept or again
            other.pin()
            other.unshard_start()
        self._unshard(unit, self._backward)
        for other in use.borrowed:
            other.unshard_wait(self.waiting)

    def _reshard_if_done(self, unit: U, use: Use) -> None:
        """Reshard a unit that ran later than `use`, and not around it."""
        done = unit.end_later(use)
        if unit.idle and (done or self._reshard_after_forward):
            unit.reshard()

    def end_backward(self) -> None:
        """End a backward pass: all ranks meet, so that none goes on while another needs it."""
        self._forget_backward()
        self.reshard_idle()
        with self._guard():
            self.waiting.meet()

    def _forget_backward(self) -> None:
        """Note that no backward pass is under way, also after one that has failed."""
        if self._backward_use is not None:
            self._backward_use.stop = self._tick()
            self._backward_use = None
            for unit in self.all:
                unit.backward = []

    # -- steps ------------------------------------------------------------------------------------

    def reshard_idle(self) -> None:
        """Reshard every unit that nothing needs now."""
        for unit in self.all:
            if unit.idle:
                unit.reshard()

    def settle(self) -> None:
        """End a step: reshard everything, and leave no allgather under way on any rank. Collective.

        A rank may have prefetched a unit that it did not use, and the others not at all. They take
        part now: the first gather of the next step would else meet it, and get old values.
        """
        self._forget_backward()
        for unit in self.all:
            unit.kept = False
            if unit.depth or unit.held:
                raise RuntimeError(
                    f"step() was called while the parameters of {unit.name!r} were in use: leave "
                    "the module's forward pass, or `with zero.gathered(...)`, before"
                )
        with self._guard():
            self.waiting.even_out()
        for unit in self.all:
            unit.unshard_finish()
            unit.reshard()

    # -- values outside of passes -----------------------------------------------------------------

    def of(self, params: Iterable[Any]) -> list[U]:
        """The units that hold any of these parameters, in order."""
        wanted = set(params)
        return [u for u in self.all if not wanted.isdisjoint(u.params)]

    def hold(self, units: Sequence[U]) -> None:
        """Gather these, and keep them gathered until `let_go`. Collective."""
        for unit in units:
            unit.unshard_start()
        for unit in units:
            unit.unshard_wait(self.waiting)
            unit.make_exact()
        for unit in units:
            unit.held += 1

    def let_go(self, units: Sequence[U]) -> None:
        """Undo `hold`: reshard those that nothing else needs."""
        for unit in units:
            unit.held -= 1
            if unit.idle:
                unit.reshard()

    def stream(self, params: Collection[Any]) -> Iterator[Any]:
        """These parameters, each while it is gathered, one unit after the other. Collective."""
        for unit in self.of(params):
            self.hold([unit])
            try:
                yield from (p for p in unit.params if p in params)
            finally:
                self.let_go([unit])

    def lend(self, units: Sequence[U]) -> None:
        """Hold these for user code, which may keep views of the parameters. Collective."""
        self.hold(units)
        for unit in units:
            unit.lend()

    def end_loan(self, units: Sequence[U]) -> None:
        """Undo `lend`."""
        self.let_go(units)
        for unit in units:
            unit.end_loan()

    def publish(self, units: Iterable[U], root: int) -> None:
        """Give all ranks what rank `root` has written into these, which are held. Collective."""
        for part in (part for unit in units for part in unit.parts):
            part.broadcast(root)
            part.keep()

    def refuse_writes(self, units: Iterable[U]) -> None:
        """Raise on all ranks if one has written into these, which are held. Collective."""
        changed = (part.changed() for unit in units for part in unit.parts)
        name = next((name for name in changed if name is not None), None)
        # A rank sees a write in its own part only; all of them have to stop.
        if self._any_rank(name is not None, "read"):
            what = "a parameter" if name is None else f"parameter {name!r}, or one beside it,"
            raise RuntimeError(
                f"{what} was written inside zero.gathered(); the new values are lost. Pass "
                "writable=True to keep them"
            )

    def fail_together(self, failed: bool) -> None:
        """Raise on all ranks if user code has failed on one, while units were lent. Collective.

        Args:
            failed: It has on this one, which raises its own error.
        """
        if self._any_rank(failed, "block") and not failed:
            raise DisagreementError(FAILED_ELSEWHERE)

    def _any_rank(self, here: bool, what: str) -> bool:
        name = f"{self.prefix}/{what}"
        return any_rank(self._collectives, here, name=name, waiting=self.waiting)

    def open(self, unit: U) -> None:
        """Let values be loaded into a unit; local. Every `open` has its `close`."""
        # Parameters that are whole on every rank are loaded as below stage 3: nobody counts that.
        if unit.parts and not any(u.is_open and u.parts for u in self.all):
            self.loads += 1
        unit.open(self.waiting)

    def close(self, unit: U) -> None:
        """Undo `open`: keep this rank's part of what has been loaded."""
        unit.close()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
