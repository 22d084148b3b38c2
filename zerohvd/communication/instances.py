"""Numbers for optimizers, agreed between ranks: their collectives need names of their own.

Horovod matches collectives by name, and one name twice in flight is an error, so every optimizer
has a number in its names. Counting locally is not enough: a rank whose earlier constructor failed,
or that joined an elastic job later, has counted differently and would wait under another name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zerohvd.communication.collectives import AsyncCollectives, Collectives, Handle
from zerohvd.errors import DisagreementError

_next: dict[int, int] = {}  # per process set: the lowest number that this rank has not used
_reports: dict[int, tuple[Handle, Any]] = {}  # failures that the other ranks may not have heard of
_NAME = "zero/agree/instance"
_FAILED = 2**62  # in the place of a number


def agree_on_instance(
    collectives: Collectives, process_set: int = 0, counters: dict[int, int] | None = None
) -> int:
    """Return a number that no rank of the process set has used; all of them must call it.

    Args:
        collectives: Joins the ranks of the process set.
        process_set: Its id; each has numbers of its own, as only its members count.
        counters: This rank's next numbers per process set; those of this process unless given.
    """
    _await_report(process_set)
    mine = _next if counters is None else counters
    own = np.array([mine.get(process_set, 0)], np.int64)
    agreed = collectives.allreduce(collectives.from_numpy(own), "max", name=_NAME)
    number = int(collectives.to_numpy(agreed)[0])
    if number >= _FAILED:
        raise DisagreementError(
            "another rank could not make its optimizer: its own error says why. No rank has made "
            "one; all ranks make optimizers together"
        )
    mine[process_set] = number + 1
    return number


def report_failure(collectives: AsyncCollectives, process_set: int = 0) -> None:
    """Tell the ranks that call `agree_on_instance` that this one cannot; does not wait for them.

    Without it they would wait until this rank makes another optimizer, and take that for theirs.
    """
    _await_report(process_set)
    said = collectives.from_numpy(np.array([_FAILED], np.int64))
    _reports[process_set] = (collectives.allreduce_start(said, "max", name=_NAME), said)


def _await_report(process_set: int) -> None:
    """One name must not be in flight twice."""
    if process_set in _reports:
        handle, _ = _reports.pop(process_set)
        handle.wait()
