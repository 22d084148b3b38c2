"""Writing a checkpoint: shards by all ranks, then the manifest, then one rename.

Until that rename the folder is called `<name>.partial-<id>`, and a checkpoint of the same name
stays where it is. A process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import queue
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerohvd._version import __version__
from zerohvd.checkpoint import format as fmt
from zerohvd.checkpoint.entries import Content, Entry
from zerohvd.checkpoint.errors import CheckpointError, cannot, together
from zerohvd.checkpoint.manifest import (
    Manifest,
    Part,
    ShardFile,
    is_complete,
    leftovers,
    put_together,
)
from zerohvd.communication.collectives import Collectives

# Write-back is started after so many bytes, while more is being prepared.
_FLUSH_BYTES = 4 << 20
_BLOCK_BYTES = 4 << 20
# How long the first rank waits for the files of others to show up, on file systems that take
# their time to show one machine what another has written.
_VISIBLE_SECONDS = 30.0


# Ids of the saves of this process: what they have written so far is no leftover of a killed one.
under_way: set[str] = set()


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
    except Exception:
        draft.discard()
        raise


def begin(path: Path, collectives: Collectives, plan: SavePlan) -> tuple[Draft, list[Any]]:
    """Agree on a new checkpoint; returns what all ranks had to say for their plans."""
    own: list[str] = []

    def act() -> dict[str, Any]:
        said = plan.look()
        if collectives.rank == 0:
            own.append(_make_folder(path))
        return {"id": own[0] if own else None, "path": str(path), "said": said}

    try:
        _, everyone = together(collectives, "begin", act)
    except Exception:
        for save_id in own:  # this rank was ready, but another was not
            shutil.rmtree(fmt.partial_path(path, save_id), ignore_errors=True)
        raise
    first = everyone[0]
    draft = Draft(path, first["id"], collectives.rank, collectives.size, first["path"])
    if draft.rank == 0:  # who removes leftovers
        under_way.add(draft.id)
    return draft, [one["said"] for one in everyone]


def _make_folder(path: Path) -> str:
    if path.exists() and not is_complete(path) and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists and is not a checkpoint: it will not be overwritten. "
            "Choose another name, or remove it"
        )
    save_id = secrets.token_hex(8)
    folder = fmt.partial_path(path, save_id)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise cannot("make", folder, error) from error
    return save_id


@dataclasses.dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    Args:
        path: Where it is going to be.
        id: Of this save.
        rank, size: This rank, and how many there are.
        agreed: What the first rank, which has made the folder, calls `path`.
    """

    path: Path
    id: str
    rank: int
    size: int
    agreed: str

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
            file, parts = write_shard(shard, content.entries, self.id, self.rank)
            fragment = {
                "file": file,
                "parts": parts,
                "values": content.values,
                "rank_state": content.rank_state,
            }
            if self.rank == 0:
                fragment["head"] = [
                    content.framework, content.step, dict(content.config), content.state,
                ]  # fmt: skip
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
        manifest = self._manifest(fragments)
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
            if stop() or time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank 0 does not see {file}, which rank {rank} has written: the path of a "
                    "checkpoint must lie on a file system that all ranks share"
                )
            time.sleep(0.02)

    def _manifest(self, fragments: Sequence[dict[str, Any]]) -> Manifest:
        framework, step, config, state = fragments[0]["head"]
        found = (
            (key, dtype, shape, Part(start, stop, rank, offset, sums))
            for rank, fragment in enumerate(fragments)
            for key, dtype, shape, start, stop, offset, sums in fragment["parts"]
        )
        values: dict[str, Any] = {}
        for fragment in fragments:
            values.update(fragment["values"])
        return Manifest(
            id=self.id,
            framework=framework,
            size=self.size,
            step=step,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            writer=f"zerohvd {__version__}",
            config=config,
            files=tuple(ShardFile(*f["file"]) for f in fragments),
            tensors=put_together(found),
            values=values,
            state=state,
            rank_states=tuple(f["rank_state"] for f in fragments),
        )

    def _move_in(self) -> None:
        """From here on it is the checkpoint `path`; the old one is loadable until then."""
        old = fmt.replaced_path(self.path, self.id)
        if is_complete(self.path):
            os.rename(self.path, old)
        os.rename(self.folder, self.path)
        _sync_folder(self.path.parent)
        under_way.discard(self.id)
        for what in ("replaced", "partial"):
            for left in leftovers(self.path, what):
                remove_leftover(left)

    def discard(self) -> None:
        """Remove what has been written; the folder's name says that it is unfinished anyway."""
        under_way.discard(self.id)
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def remove_leftover(path: Path) -> None:
    """Remove what a killed save has left, unless that save is alive and this process'."""
    if path.name.rpartition("-")[2] not in under_way:
        shutil.rmtree(path, ignore_errors=True)


def write_shard(
    path: Path, entries: Sequence[Entry], save_id: str, rank: int
) -> tuple[ShardFile, list[list[Any]]]:
    """Write `entries` as a safetensors file, straight from their memory.

    Returns:
        The file, and per entry [key, dtype, shape, start, stop, offset, sums].
    """
    # Wide elements first: all are then aligned to their own size.
    ordered = sorted(entries, key=lambda e: -fmt.itemsize(e.dtype))
    head = fmt.header(
        [
            (f"{e.key}[{e.span.start}:{e.span.stop}]", e.dtype, [e.span.length])
            for e in ordered
        ],
        {"format": fmt.FORMAT, "version": str(fmt.VERSION), "id": save_id, "rank": str(rank)},
    )
    parts: list[list[Any]] = []
    with _Checksums() as sums:
        with _Sink(path) as sink:
            sink.write(memoryview(head))
            for e in ordered:
                data = e.read()
                sums.add(data)
                parts.append([e.key, e.dtype, list(e.shape), *e.span, sink.at])
                sink.write(data)
                if callable(e.data):
                    sums.wait()  # its bytes are a copy: hold one of them at a time
            total = sink.at
        for part, found in zip(parts, sums.wait(), strict=True):
            part.append(found)
    return ShardFile(path.name, rank, total, len(head), f"{zlib.crc32(head):08x}"), parts


class _Checksums:
    """Checksums of data, in a thread: a processor that waits for the disk has the time."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._asked = 0
        self._waiting: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="zerohvd checksums", daemon=True
        )

    def __enter__(self) -> _Checksums:
        try:
            assert self._thread is not None
            self._thread.start()
        except RuntimeError:
            self._thread = None  # Python is about to end, and starts no more threads
        return self

    def __exit__(self, *_: Any) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (data := self._waiting.get()) is not None:
            self._done.put(_checksums(data))

    def add(self, data: memoryview) -> None:
        self._asked += 1
        if self._thread is None:
            self._done.put(_checksums(data))
        else:
            self._waiting.put(data)

    def wait(self) -> list[str]:
        """Of everything that was added, in order."""
        while len(self._found) < self._asked:
            self._found.append(self._done.get())
        return self._found


def _checksums(data: memoryview) -> str:
    """Eight hex digits per chunk."""
    starts = range(0, len(data), fmt.CHUNK_BYTES)
    return "".join(f"{zlib.crc32(data[i : i + fmt.CHUNK_BYTES]):08x}" for i in starts)


class _Sink:
    """A new file, written front to back, on the disk itself when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.at, self._flushed = path, 0, 0

    def __enter__(self) -> _Sink:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        return self

    def __exit__(self, failed: Any, *_: Any) -> None:
        try:
            if failed is None:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def write(self, data: memoryview) -> None:
        while data:
            count = os.write(self._fd, data[:_BLOCK_BYTES])
            data = data[count:]
            self.at += count
            if self.at - self._flushed >= _FLUSH_BYTES:
                _start_flush(self._fd, self._flushed, self.at - self._flushed)
                self._flushed = self.at


def _start_flush(fd: int, start: int, length: int) -> None:
    """Start write-back of a range; the kernel would leave most of it to fsync.

    Linux starts it for dirty pages that are said to be needed no more, and drops clean ones. Only
    a hint: errors of the disk show at fsync.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)


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
