"""Waiting for a gather, in a way that two ranks which want different units come free again.

A gather needs all ranks. Ranks that run the same units meet in it, in whatever order. But one may
run another expert, skip a block, or be in `step()` already, while its neighbour waits for it.
A rank that has waited for longer than its patience therefore says what it needs, in a small
collective under a name of its own, and learns what the others need; everyone then takes part in
what anyone needs. Ranks that are merely late are not disturbed: they say nothing, and the gather
they are waited for with ends the matter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zerohvd.errors import DisagreementError
from zerohvd.torch.collectives import Handle, LocalCollectives, TorchCollectives

if TYPE_CHECKING:
    from zerohvd.torch.gathering import Unit

PATIENCE = 0.25  # seconds before a rank asks what the others need
LIMIT = float(os.environ.get("ZEROHVD_GATHER_TIMEOUT", "600"))  # before it gives up
_POLL = 5e-5
_POLL_SLOWLY = 2e-3


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
        self._asked = 0
        self._question: tuple[torch.Tensor, torch.Tensor, Handle] | None = None

    def wait(self, handles: Sequence[Handle], unit: Unit | None = None) -> None:
        """Until all are done; `unit` is what they gather, None for anything else."""
        start = time.monotonic()
        asked = start
        for handle in handles:
            while not handle.done():
                now = time.monotonic()
                if now - start > LIMIT:
                    raise DisagreementError(self._complaint(unit, now - start))
                if now - asked > PATIENCE:
                    if self._help(unit):
                        asked = time.monotonic()
                    time.sleep(_POLL_SLOWLY)
                else:
                    time.sleep(_POLL)
            handle.wait()

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
        _, heard, handle = self._question
        if not handle.done():
            return False
        handle.wait()
        self._question = None
        for number, gathers in heard.view(-1, 2).tolist():
            if number >= 0:
                self._take_part(self._units[number], gathers)
        return True

    def _ask(self, unit: Unit | None) -> None:
        said = torch.tensor(_need(unit), dtype=torch.int64)
        heard = torch.empty(2 * self._collectives.size, dtype=torch.int64)
        name = f"{self._prefix}/need/{self._asked}"
        self._asked += 1
        lengths = [2] * self._collectives.size
        handle = self._collectives.gather_into(heard, said, lengths, name=name)
        self._question = (said, heard, handle)

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


def _need(unit: Unit | None) -> tuple[int, int]:
    return (-1, 0) if unit is None else (unit.number, unit.gathers)
