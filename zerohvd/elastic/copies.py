"""The story of a commit and of a restore: what a checkpoint stores, kept in memory instead.

A commit: the ranks meet, each puts its shard into its host's memory, and sends a copy to its
partner on another host, where there is one. When all have, the commit before is removed. A restore,
in ranks that have been started again: all say what their hosts hold, agree on the newest commit
that is whole, send each other what they lack, and load it as they would load a checkpoint, whatever
the number of ranks is now.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerohvd import limits
from zerohvd.checkpoint.entries import Want
from zerohvd.checkpoint.errors import CheckpointError, together
from zerohvd.checkpoint.reader import Reader, Source
from zerohvd.checkpoint.session import Notes, Place, Training, load_from, plan_save
from zerohvd.checkpoint.writer import manifest_of
from zerohvd.communication.collectives import Collectives
from zerohvd.communication.rendezvous import Call
from zerohvd.elastic import keeper
from zerohvd.elastic.generations import (
    Generation,
    Held,
    lost_shards,
    newest_complete,
    partners,
    shipments,
)
from zerohvd.elastic.shipping import Parcel, ship
from zerohvd.elastic.store import BODY, DESCRIPTION, SMALL, Store


class LostStateError(CheckpointError):
    """A shard and its copy are both gone: no commit is whole. Raised on every rank."""


class Copies:
    """This rank's part in keeping commits in memory.

    Args:
        job: The job's folder on tmpfs; each host has its own in it.
        host: The name of this host.
        keep: Starts a keeper for the folder of a host.
    """

    def __init__(
        self, job: Path, host: str, keep: Callable[[Path], None] = keeper.start
    ) -> None:
        self._store = Store(job / host)
        self._host, self._keep = host, keep
        self._hosts: Sequence[str] = ()
        self._number = 0
        self._generation: tuple[int, int, str] | None = None
        self.sent = 0
        """Bytes that this rank has sent to its partner in the last commit."""

    # -- committing -------------------------------------------------------------------------------

    @limits.during(Call.COMMIT.said)
    def commit(self, training: Training, extra: Any) -> None:
        """Keep the training as it is now; all ranks must call it."""
        ranks, plan = plan_save(training, Notes(extra), Call.COMMIT)
        if not self._hosts:
            self._settle(ranks)

        def look() -> dict[str, Any]:
            return {"look": plan.look(), "id": secrets.token_hex(8)}

        _, said = together(ranks, "commit", look)
        shard = Held(self._number + 1, said[0]["id"], ranks.size, ranks.rank)
        content = [one["look"] for one in said]
        try:
            together(ranks, "written", lambda: self._store.write(shard, plan.make(content)))
            self._copy(ranks, shard)
        except CheckpointError:
            # Agreed: all ranks raise it. After anything else, such as the loss of a rank, others
            # may have this commit, and not the one before any more: what is there stays.
            self._store.remove_all_but(self._generation)
            raise
        # All ranks have written, and all copies have arrived: nobody needs the one before.
        self._number, self._generation = shard.number, shard.generation
        self._store.remove_all_but(shard.generation)

    def _settle(self, ranks: Collectives) -> None:
        def come() -> str:
            self._store.open()
            keeper.hurry(self._store.folder, False)
            return self._host

        def keep() -> None:
            if self._hosts.index(self._host) == ranks.rank:
                self._keep(self._store.folder)

        _, self._hosts = together(ranks, "hosts", come)
        together(ranks, "keepers", keep)

    def _copy(self, ranks: Collectives, mine: Held) -> None:
        """Send this rank's shard to its partner, and keep those of whom this rank is it."""
        keepers = partners(self._hosts)
        parcels = []
        for rank, partner in enumerate(keepers):
            if partner is not None:
                shard = mine._replace(rank=rank)
                parcels += self._parcels(shard, rank, partner, (BODY, SMALL, DESCRIPTION))
        self.sent = ship(ranks, parcels, "copies")
        if parcels:
            together(ranks, "kept", lambda: self._accept(mine, keepers))

    def _accept(self, mine: Held, keepers: Sequence[int | None]) -> None:
        for rank, partner in enumerate(keepers):
            if partner == mine.rank:
                shard = mine._replace(rank=rank)
                self._store.accept(shard)

    def _parcels(
        self, shard: Held, source: int, target: int, whats: Sequence[str]
    ) -> list[Parcel]:
        # Names are the same on all hosts, but for the description of a copy that is under way.
        return [
            Parcel(source, target, self._store.path(shard, what), self._store.arriving(shard, what))
            for what in whats
        ]

    # -- restoring --------------------------------------------------------------------------------

    @limits.during(Call.RESTORE.said)
    def restore(self, training: Training, ranks: Collectives) -> tuple[Any] | None:
        """Load the newest commit that is whole; all ranks must call it, after they have met.

        Returns:
            What `extra` was, in a tuple; None: there has been no commit.

        Raises:
            LostStateError: There have been commits, but of each a shard is lost.
        """
        self._settle(ranks)
        _, said = together(ranks, "held", lambda: [list(held) for held in self._store.held()])
        held: dict[str, set[Held]] = {}
        for host, shards in zip(self._hosts, said, strict=True):
            held.setdefault(host, set()).update(Held(*shard) for shard in shards)
        if not any(held.values()):
            return None
        found = newest_complete(held)
        if found is None:
            raise _lost(held)
        extra = load_from(self._place(ranks, found), training, ranks)
        self._number = max(shard.number for shards in held.values() for shard in shards)
        self._generation = found.number, found.size, found.id
        self._store.remove_all_but(self._generation)
        return (extra,)

    def _place(self, ranks: Collectives, found: Generation) -> Place:
        everything = [range(found.size)] * ranks.size
        self._fetch(ranks, found, everything, SMALL)
        manifest = manifest_of(found.id, found.size, *self._descriptions(ranks, found))
        reader = Reader(self._store.folder, manifest, shared=False)

        def fetch(source: Source, wants: Sequence[Want]) -> None:
            # The first files are the bodies; the small ones behind them are here already.
            files = [i for i in reader.files_for(wants) if i < found.size]
            _, needed = together(ranks, "needed", lambda: files)
            self._fetch(ranks, found, needed, BODY)

        return Place(self._store.folder, lambda target: (reader, True), fetch)

    def _descriptions(
        self, ranks: Collectives, found: Generation
    ) -> tuple[list[Any], list[Any]]:
        """What the ranks of the commit said about their files: bodies, small ones."""
        speakers = [self._hosts.index(places[0]) for places in found.places]

        def say() -> list[Any]:
            mine = [rank for rank, speaker in enumerate(speakers) if speaker == ranks.rank]
            return [[rank, self._store.description(_shard(found, rank))] for rank in mine]

        _, said = together(ranks, "descriptions", say)
        by_rank = {rank: files for one in said for rank, files in one}
        both = [by_rank[rank] for rank in range(found.size)]
        return [body for body, _ in both], [small for _, small in both]

    def _fetch(
        self,
        ranks: Collectives,
        found: Generation,
        needed: Sequence[Sequence[int]],
        what: str,
    ) -> None:
        """Let every host have a file of the shards that its ranks need."""
        parcels = [
            Parcel(s.source, s.target, *[self._store.path(_shard(found, s.shard), what)] * 2)
            for s in shipments(found, self._hosts, needed)
        ]
        ship(ranks, parcels, "restore")

    def finish(self) -> None:
        """The training has come to its end: the keepers may give the memory back soon."""
        keeper.hurry(self._store.folder)


def _shard(found: Generation, rank: int) -> Held:
    return Held(found.number, found.id, found.size, rank)


def _lost(held: dict[str, set[Held]]) -> LostStateError:
    number, ranks = lost_shards(held)
    return LostStateError(
        f"no commit is whole: of the newest, number {number}, the shards of ranks {ranks} are gone "
        f"and so are their copies, with the hosts that had them (left: {', '.join(sorted(held))}). "
        "Start from a checkpoint on disk; with checkpoints=manager, the state does so by itself"
    )
