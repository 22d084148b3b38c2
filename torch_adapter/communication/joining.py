"""hvd.join() with sharded optimizers: all ranks at once, or an error on all of them."""

from __future__ import annotations

import weakref
from typing import Protocol

import horovod.torch as hvd
import numpy as np

from zerohvd.communication.collectives import Handle
from zerohvd.communication.rendezvous import Call, Rendezvous, come_to_all
from zerohvd.torch import compat
from zerohvd.torch.communication.collectives import join


class Sharded(Protocol):
    """A sharded optimizer; see ZeroOptimizer."""

    rendezvous: Rendezvous


_living: weakref.WeakValueDictionary[int, Sharded] = weakref.WeakValueDictionary()
_count = 0
_arrival: Handle | None = None  # of a join() that failed because other ranks did something else


def note(optimizer: Sharded) -> None:
    """Note an optimizer whose steps need all ranks of its process set."""
    global _count
    _count += 1
    _living[_count] = optimizer


def forget(optimizer: Sharded) -> None:
    for number, each in list(_living.items()):
        if each is optimizer:
            del _living[number]


def _join() -> int | None:
    """Horovod's join() supports allreduce only, and a sharded step needs every rank."""
    global _arrival
    if not _count:
        return None
    # A joined rank takes part in every operation that Horovod has cached, and an alltoall crashes
    # it: those of optimizers that are gone are cached too.
    world = join()
    if _arrival is None:
        # Kept if this call fails: Horovod has it in flight until the other ranks come.
        _arrival = world.allreduce_start(world.from_numpy(np.zeros(1)), name="zero/join")
    optimizers = [_living[number] for number in sorted(_living)]
    come_to_all(
        [each.rendezvous for each in optimizers],
        Call.JOIN,
        _arrival,
        lambda names: world.allgather_object(names, name="zero/joined"),
    )
    _arrival = None
    last: int = hvd.size() - 1
    return last


def register() -> None:
    compat.replace_join(_join)
