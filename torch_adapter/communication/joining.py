"""hvd.join() with sharded optimizers: all ranks at once, or an error on all of them."""

from __future__ import annotations

import weakref

import horovod.torch as hvd
import numpy as np

from zerohvd.communication.collectives import Handle
from zerohvd.communication.rendezvous import Call, Rendezvous, come_to_all
from zerohvd.torch import compat
from zerohvd.torch.communication.collectives import TorchCollectives

# Of the optimizers that live, in the order in which they were made; and their process sets.
_living: weakref.WeakKeyDictionary[Rendezvous, int] = weakref.WeakKeyDictionary()
_sets: dict[int, TorchCollectives] = {}  # all that have had a sharded optimizer
# Of a join() that failed because other ranks did something else: Horovod has what this rank told
# them in flight until they come, and another one of the same name would be an error.
_arrival: Handle | None = None
_unheard: dict[str, tuple[Rendezvous, int]] = {}


def note(rendezvous: Rendezvous, collectives: TorchCollectives) -> None:
    """Note an optimizer whose steps need all ranks of its process set."""
    _living[rendezvous] = collectives.process_set_id
    _sets[collectives.process_set_id] = collectives


def forget(rendezvous: Rendezvous) -> None:
    _living.pop(rendezvous, None)


def _join() -> int | None:
    """Horovod's join() supports allreduce only, and a sharded step needs every rank."""
    global _arrival
    # A joined rank takes part in every operation that Horovod has cached, and an alltoall crashes
    # it: those of optimizers that are gone are cached too.
    if not _sets:
        return None
    world = TorchCollectives()
    if _arrival is None:
        _arrival = world.allreduce_start(world.from_numpy(np.zeros(1)), name="zero/join")
    _unheard.update((place.name, (place, members)) for place, members in list(_living.items()))
    places = [place for place, _ in _unheard.values()]
    come_to_all(places, Call.JOIN, _arrival, lambda: _missed(world))
    _unheard.clear()
    _arrival = None
    last: int = hvd.size() - 1
    return last


def _missed(world: TorchCollectives) -> list[Rendezvous]:
    """Where other ranks wait for this one, which has no such optimizer any more. Collective."""
    mine = {name: members for name, (_, members) in _unheard.items()}
    found: dict[str, int] = {}
    for names in world.allgather_object(mine, name="zero/joined"):
        found.update(names)
    return [
        Rendezvous(_sets[members], name)
        for name, members in found.items()
        if name not in mine and members in _sets
    ]


def register() -> None:
    compat.replace_join(_join)
