"""Which copies of the ranks' shards there are, and what to do with them: pure arithmetic.

A commit is a generation: a shard of every rank, under one number and one id. A rank's shard lies in
the memory of its own host, and a copy of it on another host where there is one. A generation is
complete if every one of its shards is somewhere. While one is being written, the one before it
stays: so there is a complete one at every moment, whatever ranks are lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Held(NamedTuple):
    """A shard that lies in a host's memory, written to its end."""

    number: int  # of the generation: higher is newer
    id: str  # of the commit; one that was interrupted and one that came later differ in it
    size: int  # ranks of the commit
    rank: int  # whose shard

    @property
    def generation(self) -> tuple[int, int, str]:
        return self.number, self.size, self.id


class Generation(NamedTuple):
    """A complete generation, and where its shards are."""

    number: int
    id: str
    size: int
    places: tuple[tuple[str, ...], ...]
    """By rank of the commit: the hosts that hold its shard."""


def newest_complete(held: Mapping[str, Collection[Held]]) -> Generation | None:
    """The newest generation of which no shard is lost; None: there is none.

    Args:
        held: By host, what lies there.
    """
    places: dict[tuple[int, int, str], dict[int, list[str]]] = {}
    for host in sorted(held):
        for shard in sorted(set(held[host])):
            places.setdefault(shard.generation, {}).setdefault(shard.rank, []).append(host)
    for number, size, id_ in sorted(places, reverse=True):
        found = places[number, size, id_]
        if all(rank in found for rank in range(size)):
            return Generation(number, id_, size, tuple(tuple(found[r]) for r in range(size)))
    return None


def lost_shards(held: Mapping[str, Collection[Held]]) -> tuple[int, list[int]]:
    """Of the newest generation, complete or not: its number, and the ranks whose shards are gone.

    Raises:
        ValueError: Nothing is held at all.
    """
    all_held = {shard for shards in held.values() for shard in shards}
    newest = max(shard.generation for shard in all_held)
    there = {shard.rank for shard in all_held if shard.generation == newest}
    return newest[0], [rank for rank in range(newest[1]) if rank not in there]


def partners(hosts: Sequence[str]) -> list[int | None]:
    """Which rank keeps a copy of each rank's shard: one on another host; None: there is no other.

    Hosts go in pairs, which keep copies for each other: only where both hosts of a pair are lost is
    a shard lost. Of an odd number of hosts the last three keep copies in a circle.

    Args:
        hosts: The host of each rank.
    """
    rows = [[r for r, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    if len(rows) == 1:
        return [None] * len(hosts)
    found: list[int | None] = [None] * len(hosts)
    for index, row in enumerate(rows):
        keepers = rows[_keeper_host(index, len(rows))]
        for place, rank in enumerate(row):
            found[rank] = keepers[place % len(keepers)]
    return found


def _keeper_host(index: int, hosts: int) -> int:
    """The host that keeps the copies of host number `index`."""
    if hosts % 2 and index >= hosts - 3:
        first = hosts - 3
        return first + (index - first + 1) % 3
    return index ^ 1


class Shipment(NamedTuple):
    """A shard's way from one rank to another, on another host."""

    shard: int
    source: int
    target: int


def shipments(
    found: Generation, hosts: Sequence[str], needed: Sequence[Collection[int]]
) -> list[Shipment]:
    """Who sends which shard to whom so that every rank finds what it needs on its own host.

    Every host gets a shard once, whoever of its ranks need it, and those that hold the same shard
    take turns in sending.

    Args:
        found: What there is.
        hosts: The host of each rank that runs now.
        needed: By rank that runs now, the shards it is going to read.

    Raises:
        ValueError: A shard that is needed lies on no host that has a rank.
    """
    sent = [0] * len(hosts)
    plan: list[Shipment] = []
    arriving: set[tuple[str, int]] = set()
    for target, shards in enumerate(needed):
        for shard in sorted(set(shards)):
            to = hosts[target]
            if to in found.places[shard] or (to, shard) in arriving:
                continue
            senders = [r for r, host in enumerate(hosts) if host in found.places[shard]]
            if not senders:
                raise ValueError(
                    f"the shard of rank {shard} is on {', '.join(found.places[shard])}, where no "
                    "rank runs"
                )
            source = min(senders, key=lambda r: (sent[r], r))
            sent[source] += 1
            arriving.add((to, shard))
            plan.append(Shipment(shard, source, target))
    return plan
