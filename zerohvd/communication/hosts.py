"""Where the ranks are, and how they exchange parts if they are on several hosts.

An alltoall, or a ring over all ranks, crosses the link between two hosts once per rank that is
behind it. In two steps it is crossed once per host: ranks of one host first add up, or at the end
hand on, what ranks *in the same place* of other hosts exchange.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LARGE = 1 << 16  # bytes, of all parts together: what is worth two steps

_log = logging.getLogger("zerohvd")


class Step(NamedTuple):
    """One exchange, as one rank sees it. A part is named by the rank that owns it."""

    sends: Mapping[int, Sequence[int]]
    """By rank, ascending: the parts that go there, one behind the other."""

    receives: Mapping[int, Sequence[int]]
    """By rank, ascending: the parts that come from there."""

    def splits(self, lengths: Sequence[int]) -> list[int]:
        """How much goes to each of all ranks."""
        sent = [self.sends.get(rank, ()) for rank in range(len(lengths))]
        return [sum(lengths[part] for part in parts) for parts in sent]

    def sent(self) -> list[int]:
        """The parts in the order in which they are sent."""
        return [part for parts in self.sends.values() for part in parts]

    def received(self) -> list[int]:
        """The parts in the order in which they come."""
        return [part for parts in self.receives.values() for part in parts]


class Grid:
    """Ranks on several hosts, equally many on each: a table with a row per host.

    Attributes:
        column: The ranks in this one's place on all hosts, itself too, ascending.
        scatter: The two exchanges of a reducescatter. What has come is added up after each: in the
            first the parts of the column come from this host, in the second the own one from the
            others.
        gather: Those of an allgather. First the parts of the column come, then all others.
    """

    def __init__(self, rows: Sequence[Sequence[int]], rank: int) -> None:
        row = next(row for row in rows if rank in row)
        place = row.index(rank)

        def in_place(p: int) -> list[int]:
            return sorted(row[p] for row in rows)

        self.column = in_place(place)
        others = [r for r in self.column if r != rank]
        here = {r: in_place(p) for p, r in enumerate(row) if p != place}
        mine = dict.fromkeys(here, self.column)
        self.scatter = (
            Step(sends=here, receives=mine),
            Step(sends={r: [r] for r in others}, receives={r: [rank] for r in others}),
        )
        self.gather = (
            Step(sends={r: [rank] for r in others}, receives={r: [r] for r in others}),
            Step(sends=mine, receives=here),
        )


def find_grid(hosts: Sequence[str], rank: int) -> Grid | None:
    """The table of the ranks; None where two steps would cross no link less often.

    Args:
        hosts: The host of each rank.
    """
    rows = [[r for r, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    sizes = {len(row) for row in rows}
    if len(rows) == 1 or sizes == {1}:
        return None
    if len(sizes) > 1:
        if rank == 0:
            _log.warning(
                "%d ranks on %d hosts, not equally many on each: gradients and parameters cross "
                "links once per rank. Start equally many ranks on each host",
                len(hosts),
                len(rows),
            )
        return None
    if rank == 0:
        _log.info(
            "%d hosts with %d ranks each: gradients and parameters cross links once per host",
            len(rows),
            len(rows[0]),
        )
    return Grid(rows, rank)
