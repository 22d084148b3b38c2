"""One rank's shard: a safetensors file, written front to back with its checksums."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerohvd.checkpoint import format as fmt
from zerohvd.checkpoint.entries import Entry
from zerohvd.checkpoint.manifest import ShardFile

# Write-back is started after so many bytes, while more is being prepared.
_FLUSH_BYTES = 4 << 20
_BLOCK_BYTES = 4 << 20


class Written(NamedTuple):
    """What has been written.

    Args:
        file: The file.
        parts: Per entry [key, dtype, shape, start, stop, offset, sums].
    """

    file: ShardFile
    parts: list[list[Any]]


def write_shard(
    path: Path, entries: Sequence[Entry], save_id: str, rank: int, *, checked: bool = True
) -> Written:
    """Write `entries` as a safetensors file, straight from their memory.

    Args:
        path: The file to make.
        entries: What it holds.
        save_id: Of the save.
        rank: Whose file it is.
        checked: Note checksums; without them, a file is believed to be what was written, as memory
            is.
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
                sums.add(data if checked else data[:0])
                parts.append([e.key, e.dtype, list(e.shape), *e.span, sink.at])
                sink.write(data)
                if callable(e.data):
                    sums.wait()  # its bytes are a copy: hold one of them at a time
            total = sink.at
        for part, found in zip(parts, sums.wait(), strict=True):
            part.append(found)
    file = ShardFile(path.name, rank, total, len(head), f"{zlib.crc32(head):08x}")
    return Written(file, parts)


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
