"""Deadlock-free waiting when ranks need different units.

A gather needs all ranks. Ranks that run the same units meet in it, in whatever order. But one may
run another expert, skip a block, or be in `step()` already, while its neighbour waits for it. Two
ranks that wait for different units would wait for ever.

A rank that has waited for longer than its patience therefore asks a *question*: an allgather of
what each rank needs, under one name. It completes only when every rank has asked, which means that
every rank is waiting for something. With the answer, all ranks start every gather that any of them
needs. From then on the wait that the question was asked for cannot be in a deadlock, however long
it takes, so it asks at most once. A question that is still open when its wait ends stays open, is
answered by the next wait that sees it, and does not count as that one's own.

On a slow link every gather takes longer than any fixed patience, and questions in between make it
slower still. So a rank that has asked in vain, as all ranks waited for the same, is twice as
patient from then on; one that has learned something is as impatient as at first.

At the end of a backward pass all ranks meet in a question, so that none goes on to a collective of
the user's while another one still needs it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from zerohvd import limits
from zerohvd.communication.collectives import AsyncCollectives, Handle
from zerohvd.errors import WaitTimeoutError

_LONGEST_PATIENCE = 0.1  # of the limit: ranks that differ must come free well before it
_NOTHING = -1  # in the place of a unit's number: the rank needs no unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds."""

    patience: float = 0.25
    """Before a rank asks what the others need, as long as no question was in vain."""

    short_patience: float = 0.02
    """The same, for a unit that ranks were seen to need at different times."""

    limit: float = dataclasses.field(default_factory=limits.seconds)
    """Before a wait gives up."""

    poll: float = 1e-4
    """Between two looks at a handle, until the patience has run out."""

    poll_slowly: float = 1e-3
    """The same, from then on."""


class Gatherable(Protocol):
    """A unit, as far as waiting is concerned."""

    @property
    def number(self) -> int:
        """Its place in the list of all units."""

    @property
    def name(self) -> str: ...

    @property
    def gathers(self) -> int:
        """How often this rank has started to gather it."""

    def take_part(self) -> Sequence[Handle]:
        """Start one more gather because another rank needs it; counts in `gathers`."""

    def end_part(self) -> None:
        """The gather that `take_part` has started is complete."""


class _Question(NamedTuple):
    heard: Any  # per rank: a unit's number and how often the rank has gathered it
    handle: Handle


class Waiting:
    """Waits for collectives on behalf of all units of a model."""

    def __init__(
        self,
        units: Sequence[Gatherable],
        collectives: AsyncCollectives,
        prefix: str,
        timing: Timing | None = None,
    ) -> None:
        """
        Args:
            units: All units, each at the place of its number.
            prefix: Of the names of collectives.
        """
        self._units = units
        self._collectives = collectives
        self._prefix = prefix
        self._timing = timing or Timing()
        self._question: _Question | None = None
        self._complete: dict[int, int] = {}  # per unit: gathers known to be complete
        self._meetings = 0  # collectives of all ranks that have been waited for; see _ask
        self._lonely: set[int] = set()  # units that ranks were seen to need at different times
        self._patience = self._timing.patience
        self.questions = 0  # asked so far

    # -- what callers wait for --------------------------------------------------------------------

    def wait(self, handles: Sequence[Handle], unit: Gatherable | None = None) -> None:
        """Return when all handles are done; `unit` is what they gather.

        None is for a collective that all ranks come to, whatever units they have run.
        """
        if not self._wait(handles, unit, self._timing.limit):
            raise self._complaint(unit)

    def wait_for(self, handles: Sequence[Handle], seconds: float) -> bool:
        """Like `wait`, but not for longer than `seconds`; return whether all are done."""
        return self._wait(handles, None, seconds)

    def meet(self) -> None:
        """Return when no rank needs a unit any more: each has come here or to `step()`."""
        if self._collectives.size == 1:
            return
        deadline = limits.Deadline(self._timing.limit)
        through = False
        while not through:
            if self._question is None:
                self._ask(None)
            assert self._question is not None
            if not self._poll([self._question.handle], deadline):
                with limits.during("a forward or backward pass"):
                    raise self._complaint(None)
            through = self._answer(None, deadline)

    def even_out(self) -> None:
        """Take part in gathers until every rank has gathered every unit equally often.

        Afterwards every gather under way completes by itself, and shards may change: a question of
        a rank that is ahead is left to the next wait.
        """
        c = self._collectives
        if c.size == 1:
            return
        deadline = limits.Deadline(self._timing.limit)
        counts = c.from_numpy(np.array([u.gathers for u in self._units], np.int64))
        handle = c.allreduce_start(counts, "max", name=f"{self._prefix}/gathers")
        if not self._wait([handle], None, self._timing.limit, is_last=True):
            raise self._complaint(None)
        for unit, gathers in zip(self._units, c.to_numpy(counts).tolist(), strict=True):
            self._take_part(unit, gathers, deadline)

    # -- waiting ----------------------------------------------------------------------------------

    def _wait(
        self,
        handles: Sequence[Handle],
        unit: Gatherable | None,
        limit: float,
        *,
        is_last: bool = False,
    ) -> bool:
        """
        Args:
            is_last: No rank needs a unit of this step once the handles are done. A question that
                is complete by then may have been asked by a rank that is in its next step, and an
                answer would give it this rank's old shard.
        """
        started = time.monotonic()
        deadline = limits.Deadline(limit)
        lonely = unit is not None and unit.number in self._lonely
        ask = _AskingRule(self._timing.short_patience if lonely else self._patience)
        alone = self._collectives.size == 1

        def look(now: float) -> None:
            if alone:
                return
            waited = now - started
            # In this order: what is complete before the handles are comes from this step.
            if self._is_complete() and not (is_last and all(h.done() for h in handles)):
                self._answer_for(unit, ask, waited, deadline)
            if self._question is None and ask.is_due(waited):
                self._ask(unit)
                ask.is_open = True

        if not self._poll(handles, deadline, look, unit):
            return False
        for handle in handles:
            handle.wait()
        # Others may wait for this rank's part in the answer, whether it has had to poll or not.
        if self._is_complete() and not is_last:
            self._answer_for(unit, ask, limit, deadline)
        if unit is None:
            self._meetings += 1
        else:
            self._complete[unit.number] = unit.gathers
        return True

    def _is_complete(self) -> bool:
        return self._question is not None and self._question.handle.done()

    def _answer_for(
        self, unit: Gatherable | None, ask: _AskingRule, waited: float, deadline: limits.Deadline
    ) -> None:
        """Answer the question, which is complete, in a wait for `unit`."""
        own = ask.is_open
        idle = self._answer(unit if own else None, deadline, impatient=True)
        if own:
            # Unit: every rank has started this gather by now. No unit: others may need several
            # units one after the other before they come to where this rank is.
            ask.answered(again=unit is None, waited=waited, idle=idle)

    def _poll(
        self,
        handles: Sequence[Handle],
        deadline: limits.Deadline,
        look: Callable[[float], None] | None = None,
        unit: Gatherable | None = None,
    ) -> bool:
        """Return True when all handles are done, False at the deadline."""
        if all(handle.done() for handle in handles):
            return True
        with self._collectives.log.waiting(_what(unit)):
            return self._poll_one_by_one(handles, deadline, look)

    def _poll_one_by_one(
        self,
        handles: Sequence[Handle],
        deadline: limits.Deadline,
        look: Callable[[float], None] | None,
    ) -> bool:
        started = time.monotonic()
        for handle in handles:
            while not handle.done():
                if deadline.passed():
                    return False
                if deadline.stalled():
                    limits.warn_of(handle, deadline.waited)
                now = time.monotonic()
                if look is not None:
                    look(now)
                quick = now - started < self._timing.patience
                time.sleep(self._timing.poll if quick else self._timing.poll_slowly)
        return True

    def _complaint(self, unit: Gatherable | None) -> WaitTimeoutError:
        c = self._collectives
        return limits.timed_out(c.members[c.rank], c.members, _what(unit), self._timing.limit)

    # -- questions --------------------------------------------------------------------------------

    def _ask(self, unit: Gatherable | None) -> None:
        """Start the allgather of needs.

        A rank that needs no unit says how many meetings lie behind it: all ranks take part in each,
        so whoever hears a lower number knows that the rank has gone on since.
        """
        c = self._collectives
        need = (_NOTHING, self._meetings) if unit is None else (unit.number, unit.gathers)
        heard = c.from_numpy(np.zeros(2 * c.size, np.int64))
        own = c.from_numpy(np.array(need, np.int64))
        handle = c.gather_into(heard, own, [2] * c.size, name=f"{self._prefix}/need")
        self._question = _Question(heard, handle)
        self.questions += 1

    def _answer(
        self, unit: Gatherable | None, deadline: limits.Deadline, *, impatient: bool = False
    ) -> bool:
        """Take part in what the ranks said they need; return whether all need nothing now.

        Args:
            unit: What this rank waits for, if the question was asked for that.
            impatient: The question was asked because a wait was long.
        """
        assert self._question is not None
        (heard, handle), self._question = self._question, None
        handle.wait()
        needs = [(n, g) for n, g in self._collectives.to_numpy(heard).reshape(-1, 2).tolist()]
        current = {need for need in needs if not self._is_past(*need)}
        if impatient:
            self._learn(in_vain=len(current) <= 1)
        if unit is not None:
            different = bool(current - {(unit.number, unit.gathers)})
            (self._lonely.add if different else self._lonely.discard)(unit.number)
        for number, gathers in needs:
            if number != _NOTHING:
                self._take_part(self._units[number], gathers, deadline)
        idle = set(needs) == {(_NOTHING, self._meetings)}
        # Ranks that have counted differently, since one of them failed in a meeting, agree again.
        said = [meetings for number, meetings in needs if number == _NOTHING]
        self._meetings = max([self._meetings, *said])
        return idle

    def _learn(self, *, in_vain: bool) -> None:
        longest = self._timing.limit * _LONGEST_PATIENCE
        self._patience = min(2 * self._patience, longest) if in_vain else self._timing.patience

    def _is_past(self, number: int, count: int) -> bool:
        """Whether what a rank said it needs has been complete since."""
        if number == _NOTHING:
            return count < self._meetings
        return count <= self._complete.get(number, 0)

    def _take_part(self, unit: Gatherable, gathers: int, deadline: limits.Deadline) -> None:
        """Gather a unit that this rank does not need, until it has been gathered that often.

        Every rank that is behind does so, in the order of the answer, so each of these gathers
        completes. Where the unit is unsharded already the same values overwrite themselves.
        """
        while unit.gathers < gathers:
            handles = unit.take_part()
            if not self._poll(handles, deadline, None, unit):
                raise self._complaint(unit)
            for handle in handles:
                handle.wait()
            unit.end_part()
            self._complete[unit.number] = unit.gathers


def _what(unit: Gatherable | None) -> str:
    return "a meeting of all ranks" if unit is None else f"unit {unit.name!r} to be gathered"


class _AskingRule:
    """When one wait may ask."""

    def __init__(self, patience: float) -> None:
        self.is_open = False  # this wait's own question has not been answered yet
        self._patience = patience
        self._due: float | None = self._patience  # seconds of waiting; None: never again

    def is_due(self, waited: float) -> bool:
        return not self.is_open and self._due is not None and waited >= self._due

    def answered(self, *, again: bool, waited: float, idle: bool) -> None:
        """This wait's question has been answered.

        Args:
            again: The wait may ask once more.
            idle: No rank needs a unit: they are all on their way to the same collective. Ask less
                and less often, as the collective is merely slow.
        """
        self.is_open = False
        if not again:
            self._due = None
        elif idle:
            self._patience *= 2
            self._due = waited + self._patience
        else:
            self._due = waited
