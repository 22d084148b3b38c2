"""Waiting for a gather, in a way that two ranks which want different units come free again.

A gather needs all ranks. Ranks that run the same units meet in it, in whatever order. But one may
run another expert, skip a block, or be in `step()` already, while its neighbour waits for it.
A rank that has waited for longer than its patience therefore says what it needs, in a small
collective under a name of its own, and learns what the others need; everyone then takes part in
what anyone needs. Ranks that are merely late are not disturbed: they say nothing, and the gather
they are waited for with ends the matter. At the end of a backward pass all ranks meet in that
collective, so that none goes on to something else while another one still needs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zerohvd.errors import DisagreementError
from zerohvd.torch.communication.collectives import Handle, LocalCollectives, TorchCollectives

if TYPE_CHECKING:
    from zerohvd.torch.stage3.unit import Unit

PATIENCE = 0.25  # seconds before a rank asks what the others need
SHORT_PATIENCE = 0.02  # the same, for a unit that had to be asked for before
LIMIT = float(os.environ.get("ZEROHVD_GATHER_TIMEOUT", "600"))  # before it gives up
_POLL = 1e-4
_POLL_SLOWLY = 1e-3


class _Question(NamedTuple):
    heard: torch.Tensor  # per rank: the number of the unit it needs, and how often it has asked
    handle: Handle


class Waiting:
    """Waits for collectives on behalf of all units of a model."""

    def __init__(
        self,
        units: Sequence[Unit],
        collectives: TorchCollectives | LocalCollectives,
        prefix: str,
    ) -> None:
        self._units = units
        self._collectives = collectives
        self._prefix = prefix
        self._question: _Question | None = None
        self._lonely: set[Unit] = set()  # units that not all ranks come for by themselves

    def wait(self, handles: Sequence[Handle], unit: Unit | None = None) -> None:
        """Until all are done; `unit` is what they gather, None for a meeting of all ranks."""
        start = time.monotonic()
        asked = start
        patience = PATIENCE if unit is None or unit not in self._lonely else SHORT_PATIENCE
        for handle in handles:
            while not handle.done():
                now = time.monotonic()
                if now - start > LIMIT:
                    raise DisagreementError(self._complaint(unit, now - start))
                if now - asked > patience:
                    if self._help(unit):
                        asked = time.monotonic()
                    time.sleep(_POLL_SLOWLY)
                else:
                    time.sleep(_POLL)
            handle.wait()

    def meet(self) -> None:
        """Return when no rank needs a unit any more, each having come here or to `step()`."""
        if isinstance(self._collectives, LocalCollectives):
            return
        start = time.monotonic()
        through = False
        while not through:
            if self._question is None:
                self._ask(None)
            assert self._question is not None
            while not self._question.handle.done():
                if time.monotonic() - start > LIMIT:
                    raise DisagreementError(self._complaint(None, LIMIT))
                time.sleep(_POLL)
            through = self._answer()

    def _complaint(self, unit: Unit | None, waited: float) -> str:
        what = "the other ranks" if unit is None else f"unit {unit.name!r} to be gathered"
        return (
            f"rank {self._collectives.rank} has waited {waited:.0f} s for {what}. At stage 3 all "
            "ranks run the model together: do not call it, state_dict() or zero.gathered() on some "
            "ranks only, and see whether another rank has failed. Longer steps need a larger "
            "ZEROHVD_GATHER_TIMEOUT (seconds)"
        )

    # -- helping ----------------------------------------------------------------------------------

    def _help(self, unit: Unit | None) -> bool:
        """Say what this rank needs, and take part in what others need; True if they answered."""
        if isinstance(self._collectives, LocalCollectives):
            return True
        if self._question is None:
            self._ask(unit)
        assert self._question is not None
        if not self._question.handle.done():
            return False
        if unit is not None:
            self._lonely.add(unit)
        self._answer()
        return True

    def _ask(self, unit: Unit | None) -> None:
        need = (-1, 0) if unit is None else (unit.number, unit.gathers)
        said = torch.tensor(need, dtype=torch.int64)
        heard = torch.empty(2 * self._collectives.size, dtype=torch.int64)
        name = f"{self._prefix}/need"
        lengths = [2] * self._collectives.size
        handle = self._collectives.gather_into(heard, said, lengths, name=name)
        self._question = _Question(heard, handle)

    def _answer(self) -> bool:
        """Take part in what the ranks said they need; whether they need nothing."""
        assert self._question is not None
        (heard, handle), self._question = self._question, None
        handle.wait()
        needs = heard.view(-1, 2).tolist()
        for number, gathers in needs:
            if number >= 0:
                self._take_part(self._units[number], gathers)
        return all(number < 0 for number, _ in needs)

    def _take_part(self, unit: Unit, gathers: int) -> None:
        """Gather a unit that this rank does not need, because another has begun to.

        Every rank that is behind comes here, so waiting ends. Where the unit is whole already the
        same values are written over themselves.
        """
        with torch.inference_mode(False), torch.no_grad():
            while unit.gathers < gathers:
                for handle in unit.take_part():
                    handle.wait()
                unit.end_part()

    def even_out(self) -> None:
        """All ranks have gathered every unit equally often, after this."""
        if isinstance(self._collectives, LocalCollectives):
            return
        counts = torch.tensor([u.gathers for u in self._units], dtype=torch.int64)
        handle = self._collectives.allreduce_start(counts, "max", name=f"{self._prefix}/gathers")
        self.wait([handle])
        for unit, gathers in zip(self._units, counts.tolist(), strict=True):
            self._take_part(unit, gathers)
