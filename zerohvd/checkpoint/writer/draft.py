"""Writing a checkpoint: shards by all ranks, then the manifest, then one rename.

Until that rename the folder is called `<name>.partial-<id>`, and a checkpoint of the same name
stays where it is. A process may be killed at any moment, and another job may want the same name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerohvd.checkpoint import format as fmt
from zerohvd.checkpoint.entries import Content
from zerohvd.checkpoint.errors import CheckpointError, cannot, together
from zerohvd.checkpoint.manifest import is_complete, leftovers
from zerohvd.checkpoint.writer.claim import Claim, may_live
from zerohvd.checkpoint.writer.fragments import fragment_of, manifest_of
from zerohvd.checkpoint.writer.shard import write_shard
from zerohvd.communication.collectives import Collectives

# How long the first rank waits for the files of others to show up, on file systems that take
# their time to show one machine what another has written.
_VISIBLE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """How a rank comes to what it stores. Errors of both are raised on all ranks.

    Args:
        look: What the other ranks must know first, as JSON can say it.
        make: From what all ranks have said, in rank order: what this one stores.
    """

    look: Callable[[], Any]
    make: Callable[[list[Any]], Content]


def save(path: Path, collectives: Collectives, plan: SavePlan) -> None:
    """Store a checkpoint; all ranks must call it. Returns when it is complete and durable.

    Args:
        path: The folder to make. A checkpoint that is there is replaced once the new one stands.
        collectives: Joins the ranks that write.
        plan: What this rank stores.
    """
    draft, said = begin(path, collectives, plan)
    try:
        together(collectives, "write", lambda: draft.write(plan.make(said)))
        together(collectives, "publish", draft.publish)
    except BaseException:  # an interrupt, too: the next save of this process must find no claim
        draft.discard()
        raise


def begin(path: Path, collectives: Collectives, plan: SavePlan) -> tuple[Draft, list[Any]]:
    """Agree on a new checkpoint; returns what all ranks had to say for their plans."""
    if path.is_symlink():
        path = Path(os.path.realpath(path))  # what it points to is replaced, as by open()
    own: list[Claim] = []

    def act() -> dict[str, Any]:
        said = plan.look()
        if collectives.rank == 0:
            own.append(_make_folder(path))
        return {"id": own[0].id if own else None, "path": str(path), "said": said}

    try:
        _, everyone = together(collectives, "begin", act)
    except BaseException:
        for claim in own:  # this rank was ready, but another was not
            shutil.rmtree(fmt.partial_path(path, claim.id), ignore_errors=True)
            claim.release()
        raise
    first = everyone[0]
    mine = own[0] if own else None
    draft = Draft(path, first["id"], collectives.rank, collectives.size, first["path"], mine)
    return draft, [one["said"] for one in everyone]


def _make_folder(path: Path) -> Claim:
    """Claim the checkpoint, and make the folder it is written to."""
    save_id = secrets.token_hex(8)
    folder = fmt.partial_path(path, save_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_free(path)
        claim = Claim.take(path, save_id)
        try:
            folder.mkdir()
        except OSError:
            claim.release()
            raise
    except FileExistsError:
        raise cannot("make", folder, OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))) from None
    except (OSError, ValueError) as error:  # the latter: no file system has such names
        raise cannot("make", folder, error) from error
    return claim


def _check_free(path: Path) -> None:
    if path.exists() and not is_complete(path) and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists and is not a checkpoint: it will not be overwritten. "
            "Choose another name, or remove it"
        )


@dataclasses.dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    Args:
        path: Where it is going to be.
        id: Of this save.
        rank, size: This rank, and how many there are.
        agreed: What the first rank, which has made the folder, calls `path`.
        claim: On the first rank, the right to write there.
    """

    path: Path
    id: str
    rank: int
    size: int
    agreed: str
    claim: Claim | None = None

    @property
    def folder(self) -> Path:
        return fmt.partial_path(self.path, self.id)

    def _fragment(self, rank: int) -> Path:
        """What a rank says about its shard; the manifest is made of these."""
        return (self.folder / fmt.shard_name(rank, self.size)).with_suffix(".json")

    def write(self, content: Content) -> None:
        """Write this rank's shard, to the disk itself."""
        shard = self.folder / fmt.shard_name(self.rank, self.size)
        try:
            written = write_shard(shard, content.entries, self.id, self.rank)
            fragment = fragment_of(content, written, self.rank)
            # For rank 0 to see, not for the disk to keep.
            _write(self._fragment(self.rank), json.dumps(fragment).encode(), durably=False)
        except FileNotFoundError:
            raise CheckpointError(
                f"cannot write {shard}: its folder is not there, though rank 0 has made it for "
                f"{self.agreed}. All ranks must give the same path, on a file system they share"
            ) from None
        except OSError as error:
            raise cannot("write", shard, error) from error

    def publish(self, stop: Callable[[], bool] = lambda: False, *, patient: bool = False) -> None:
        """Make the shards of all ranks a checkpoint; does nothing but on rank 0.

        Args:
            stop: Asked while the files of other ranks are waited for; true gives up.
            patient: The other ranks may still be writing: wait until told to stop.
        """
        if self.rank != 0:
            return
        seconds = math.inf if patient else _VISIBLE_SECONDS
        fragments = [self._read_fragment(rank, stop, seconds) for rank in range(self.size)]
        manifest = manifest_of(self.id, self.size, fragments)
        try:
            for rank in range(self.size):
                self._fragment(rank).unlink()
            _write(self.folder / fmt.MANIFEST, manifest.to_bytes(), durably=True)
            _sync_folder(self.folder)
            self._move_in()
        except OSError as error:
            raise cannot("finish", self.path, error) from error

    def _read_fragment(
        self, rank: int, stop: Callable[[], bool], seconds: float
    ) -> dict[str, Any]:
        file = self._fragment(rank)
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(FileNotFoundError):
                fragment: dict[str, Any] = json.loads(file.read_bytes())
                return fragment
            if self.claim is not None and not self.folder.exists():
                self.claim.check()  # says who has removed it, if anybody has
                raise CheckpointError(f"{self.folder} was removed while it was being written")
            if stop() or time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank 0 does not see {file}, which rank {rank} has written: the path of a "
                    "checkpoint must lie on a file system that all ranks share"
                )
            time.sleep(0.02)

    def _move_in(self) -> None:
        """From here on it is the checkpoint `path`; the old one is loadable until then."""
        assert self.claim is not None
        self.claim.check()
        old = fmt.replaced_path(self.path, self.id)
        replaces = is_complete(self.path)
        if replaces:
            for left in leftovers(self.path, "replaced"):
                remove(left)  # older than the one that is there, and must not outlive it
            os.rename(self.path, old)
        try:
            os.rename(self.folder, self.path)
        except OSError:
            if replaces:
                with contextlib.suppress(OSError):  # unless another job has put one there
                    os.rename(old, self.path)
            raise
        _sync_folder(self.path.parent)
        # While this job has the claim, whatever else is there belongs to nobody who lives.
        for what in ("replaced", "partial", "saving"):
            for left in leftovers(self.path, what):
                remove(left)
        self.claim.release()

    def discard(self) -> None:
        """Remove what has been written; the folder's name says that it is unfinished anyway."""
        if self.claim is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.claim.release()


def remove_leftover(path: Path) -> None:
    """Remove what a killed save has left, unless that save is alive."""
    left = fmt.leftover(path)
    if left is None or not may_live(path.with_name(left[0]), fmt.id_of(path)):
        remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint, finished or not, by a name first that says it is none.

    Killed half-way, the rest is known as unfinished; and a save that was taken for dead finds its
    folder gone, whole, in place of being published without some of its files.
    """
    left = fmt.leftover(path)
    name = path.name if left is None else left[0]
    gone = fmt.partial_path(path.with_name(name), secrets.token_hex(8))
    try:
        os.rename(path, gone)
    except OSError:
        return  # somebody else has removed it
    if gone.is_dir():
        shutil.rmtree(gone, ignore_errors=True)
    else:
        gone.unlink(missing_ok=True)


def _write(path: Path, data: bytes, *, durably: bool) -> None:
    """All of it under its name, or nothing."""
    draft = path.with_name(f"{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        if durably:
            os.fsync(file.fileno())
    os.rename(draft, path)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
