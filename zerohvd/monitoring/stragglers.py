"""Which rank the others wait for, from how long each of them waits.

All ranks take equally long for a step, since each waits for the slowest. So the slowest is the one
that waits least, and the others wait longer by as much as it is behind.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Ranks always differ a little: where they share cores, by some milliseconds. A difference counts
# when it is longer than both.
_SHARE_OF_STEP = 0.05
_SECONDS = 0.002


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    host: str
    behind: float  # seconds per step

    def __str__(self) -> str:
        where = f" ({self.host})" if self.host else ""
        return f"rank {self.rank}{where} +{1e3 * self.behind:.0f} ms"


def behind(waits: Sequence[float]) -> list[float]:
    """Per rank, by how many seconds it is slower than the others; 0 for those that are not.

    Args:
        waits: Seconds that each rank has waited per step.
    """
    found = []
    for rank, own in enumerate(waits):
        others = [w for r, w in enumerate(waits) if r != rank]
        found.append(max(0.0, statistics.median(others) - own) if others else 0.0)
    return found


def find_straggler(
    waits: Sequence[float], seconds: float, hosts: Sequence[str], members: Sequence[int]
) -> Straggler | None:
    """The rank that is furthest behind; None if none is by so much that it counts.

    Args:
        waits: Seconds that each rank has waited per step.
        seconds: Of a step.
        hosts: Of the ranks; may be empty.
        members: What the ranks are called.
    """
    late = behind(waits)
    rank = max(range(len(late)), key=late.__getitem__)
    if late[rank] <= max(_SECONDS, _SHARE_OF_STEP * seconds):
        return None
    return Straggler(members[rank], hosts[rank] if hosts else "", late[rank])
