"""Numbers for optimizers, agreed between ranks: their collectives need names of their own.

Horovod matches collectives by name, and one name twice in flight is an error, so every optimizer
has a number in its names. Counting locally is not enough: a rank whose earlier constructor failed,
or that joined an elastic job later, has counted differently and would wait under another name.
"""

from __future__ import annotations

import numpy as np

from zerohvd.communication.collectives import Collectives

_next: dict[int, int] = {}  # per process set: the lowest number that this rank has not used


def agree_on_instance(
    collectives: Collectives, process_set: int = 0, counters: dict[int, int] | None = None
) -> int:
    """Return a number that no rank of the process set has used; all of them must call it.

    Args:
        collectives: Joins the ranks of the process set.
        process_set: Its id; each has numbers of its own, as only its members count.
        counters: This rank's next numbers per process set; those of this process unless given.
    """
    mine = _next if counters is None else counters
    own = np.array([mine.get(process_set, 0)], np.int64)
    agreed = collectives.allreduce(collectives.from_numpy(own), "max", name="zero/agree/instance")
    number = int(collectives.to_numpy(agreed)[0])
    mine[process_set] = number + 1
    return number
