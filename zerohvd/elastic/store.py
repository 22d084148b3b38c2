"""Shards in the memory of one host: files of a folder on tmpfs, which no process has to hold.

A shard is two files and a description: ".body" has what is cut by elements and large, ".small" the
rest, which every rank may need for a start. The description comes last, by a rename: what has none
was not written to its end, and counts as nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from zerohvd.checkpoint.entries import Content
from zerohvd.checkpoint.errors import CheckpointError, cannot
from zerohvd.checkpoint.matching import OWN, SHARED
from zerohvd.checkpoint.writer import fragment_of, write_shard
from zerohvd.elastic import keeper
from zerohvd.elastic.generations import Held

BODY, SMALL, DESCRIPTION = ".body", ".small", ".json"
_STEM = re.compile(r"(\d+)-([0-9a-f]{16})-(\d+)-of-(\d+)\.json")


class Store:
    """What one host holds of one job.

    Args:
        folder: Of this host alone, on tmpfs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._user = -1

    def open(self) -> None:
        """Make the folder, and say that somebody uses it as long as this process lives."""
        if self._user >= 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            os.close(os.open(self.folder / keeper.KEEPER, flags, 0o600))
            self._user = os.open(self.folder / keeper.USERS, flags, 0o600)
        except OSError as error:
            raise cannot("make", self.folder, error) from error
        fcntl.flock(self._user, fcntl.LOCK_SH)

    def path(self, shard: Held, what: str) -> Path:
        return self.folder / f"{shard.number}-{shard.id}-{shard.rank}-of-{shard.size}{what}"

    def held(self) -> list[Held]:
        """The shards that were written to their end."""
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return []
        found = (_STEM.fullmatch(name) for name in names)
        return [Held(int(m[1]), m[2], int(m[4]), int(m[3])) for m in found if m]

    def write(self, shard: Held, content: Content) -> None:
        """Put this rank's shard into memory."""
        small = [e for e in content.entries if e.kind in (SHARED, OWN)]
        body = [e for e in content.entries if e.kind not in (SHARED, OWN)]
        said = []
        try:
            for what, entries in ((BODY, body), (SMALL, small)):
                written = write_shard(
                    self.path(shard, what), entries, shard.id, shard.rank, checked=False
                )
                said.append(fragment_of(content, written, shard.rank))
            self.describe(shard, said)
        except OSError as error:
            raise self.full(error) from error

    def describe(self, shard: Held, said: Any) -> None:
        """From here on the shard is held."""
        self.arriving(shard, DESCRIPTION).write_text(json.dumps(said))
        self.accept(shard)

    def description(self, shard: Held) -> Any:
        """What its rank said about its two files."""
        file = self.path(shard, DESCRIPTION)
        try:
            return json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise cannot("read", file, error) from error

    def arriving(self, shard: Held, what: str) -> Path:
        """Where a file of another host goes: a description does not count before `accept`."""
        return self.path(shard, ".draft" if what == DESCRIPTION else what)

    def accept(self, shard: Held) -> None:
        """From here on a shard that has come from another host is held."""
        os.rename(self.arriving(shard, DESCRIPTION), self.path(shard, DESCRIPTION))

    def full(self, error: OSError) -> CheckpointError:
        """What an error of the file system means."""
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(self.folder).free >> 20} MiB"
        return CheckpointError(
            f"cannot keep a copy in {self.folder}: {error.strerror or error}; free there: {free}. "
            "A host needs room for two commits of its ranks, and two of those whose copies it "
            "keeps: make /dev/shm larger (docker: --shm-size), or commit less"
        )

    def remove_all_but(self, keep: tuple[int, int, str] | None) -> None:
        """Remove files of all generations but one, and what was not written to its end."""
        whole = {self.path(s, "").name for s in self.held() if s.generation == keep}
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                if not name.endswith(".lock") and name.rpartition(".")[0] not in whole:
                    with contextlib.suppress(OSError):  # another rank of this host was first
                        os.unlink(self.folder / name)
