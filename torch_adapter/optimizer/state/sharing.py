"""What other ranks may take of an optimizer, whatever this rank's main thread does."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from zerohvd.peers.group import Guard, Job, Peers, Version, find_peers
from zerohvd.peers.star import StarCollectives
from zerohvd.torch.communication.collectives import TorchCollectives
from zerohvd.torch.communication.star import TorchStar
from zerohvd.torch.gradients.owner import Gradients
from zerohvd.torch.gradients.section import Section
from zerohvd.torch.optimizer.state import whole
from zerohvd.torch.stage3.units import Units
from zerohvd.training.step import MustAgree


@dataclasses.dataclass
class Holdings:
    """What the state of an optimizer is made of. Keeps no optimizer alive: that may be deleted
    while another rank is still saving."""

    inner: torch.optim.Optimizer
    groups: list[list[torch.nn.Parameter]]
    unsharded: dict[torch.nn.Parameter, whole.State]
    sections: Sequence[Section]
    prefix: str


class Sharing:
    """Gives other ranks this rank's part of an optimizer's state, and takes theirs.

    Attributes:
        guard: Of the values.
        steps: That have been made.
    """

    def __init__(
        self,
        held: Holdings,
        collectives: TorchCollectives,
        agreed: MustAgree,
        gradients: Gradients,
        units: Units | None,
    ) -> None:
        """All ranks must call it."""
        self.guard = Guard()
        self.steps = 0
        self._held, self._collectives, self._agreed = held, collectives, agreed
        self._gradients = weakref.ref(gradients)
        self._units = None if units is None else weakref.ref(units)
        jobs: dict[str, Job] = {"optimizer": self._give}
        if units is not None:
            jobs["model"] = units.give
        self._peers = find_peers(collectives, collectives.hosts, held.prefix, self, jobs)
        if self._peers is not None:
            self._peers.tell_whereabouts(collectives.whereabouts)
        if units is not None:
            units.peers = self._peers

    @property
    def version(self) -> Version:
        return Version(self.steps, self._agreed.all_loads())

    @property
    def is_changing(self) -> bool:
        gradients = self._gradients()
        return gradients is not None and gradients.begun

    def is_alone(self, call: str) -> bool:
        """Whether not all ranks make this call now; where they cannot ask each other, False."""
        return self._peers is not None and not self._peers.all_come(call)

    def take(self) -> dict[str, Any]:
        """The whole state, without the other ranks' main threads."""
        assert self._peers is not None
        if all(section.layout.size == 1 for section in self._held.sections):
            return whole.consolidate(self._held, self._collectives, None)
        with self._peers.take("optimizer", "opt.state_dict()") as star:
            return whole.consolidate(self._held, TorchStar(star), self._collectives.rank)

    def _give(self, star: StarCollectives, request: Any) -> None:
        whole.consolidate(self._held, TorchStar(star), star.root)

    def let_go(self) -> None:
        """The optimizer is gone."""
        peers = self._part()
        if peers is not None:
            peers.let_go()

    def close(self) -> None:
        """Give nothing any more."""
        peers = self._part()
        if peers is not None:
            peers.close()

    def _part(self) -> Peers | None:
        """Ask no more. The others refer to this object: in a cycle its memory would wait for the
        garbage collector, and a model that lives on would keep the optimizer's state."""
        peers, self._peers = self._peers, None
        self._collectives.whereabouts.ask = None
        units = None if self._units is None else self._units()
        if units is not None:
            units.peers = None
        return peers
