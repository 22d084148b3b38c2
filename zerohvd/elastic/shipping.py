"""Moving files of one host's memory to another's, over the collectives that ranks have anyway."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerohvd.checkpoint.errors import together
from zerohvd.communication.collectives import Collectives

# What one rank sends to one other at a time: bounds the memory that shipping takes.
_BLOCK = 8 << 20


class Parcel(NamedTuple):
    """A file on its way; the same list of them on all ranks, in one order."""

    source: int
    target: int
    file: Path  # where it lies on the source
    into: Path  # where it goes on the target; the same path where the host has another name


def ship(ranks: Collectives, parcels: Sequence[Parcel], name: str) -> int:
    """Move files between ranks; all ranks must call it. Returns how many bytes this rank sent.

    An error on one rank, such as no space left, is raised on all of them when all are through.
    """
    if not parcels:
        return 0
    mine = [i for i, p in enumerate(parcels) if p.source == ranks.rank]
    _, said = together(
        ranks, f"{name}/sizes", lambda: [[i, os.stat(parcels[i].file).st_size] for i in mine]
    )
    sizes = {i: size for one in said for i, size in one}
    streams: dict[tuple[int, int], int] = {}
    for i, parcel in enumerate(parcels):
        pair = parcel.source, parcel.target
        streams[pair] = streams.get(pair, 0) + sizes[i]
    outgoing = _Outgoing(ranks, parcels, sizes)
    incoming = _Incoming(ranks, parcels, sizes)
    for block in range(-(-max(streams.values()) // _BLOCK)):
        data, splits = outgoing.block(block)
        came = ranks.alltoall(ranks.from_numpy(data), splits, name=f"zero/elastic/{name}")
        incoming.take(ranks.to_numpy(came), block)
    together(ranks, f"{name}/stored", lambda: incoming.finish(outgoing.error))
    return sum(sizes[i] for i in mine)


class _Outgoing:
    """What this rank sends: per target, its files one behind the other, block by block."""

    def __init__(
        self, ranks: Collectives, parcels: Sequence[Parcel], sizes: dict[int, int]
    ) -> None:
        self._size = ranks.size
        self.error: OSError | None = None
        self._files: dict[int, list[tuple[Path, int]]] = {}
        for i, parcel in enumerate(parcels):
            if parcel.source == ranks.rank:
                self._files.setdefault(parcel.target, []).append((parcel.file, sizes[i]))

    def block(self, number: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], list[int]]:
        parts = [self._part(target, number) for target in range(self._size)]
        data = np.frombuffer(b"".join(parts), np.uint8).copy()
        return data, [len(part) for part in parts]

    def _part(self, target: int, number: int) -> bytes:
        start, stop, at = number * _BLOCK, (number + 1) * _BLOCK, 0
        found = []
        for file, size in self._files.get(target, ()):
            begin, end = max(start, at), min(stop, at + size)
            if begin < end:
                found.append(self._read(file, begin - at, end - begin))
            at += size
        return b"".join(found)

    def _read(self, file: Path, offset: int, length: int) -> bytes:
        data = b""
        try:
            with file.open("rb") as opened:
                opened.seek(offset)
                data = opened.read(length)
        except OSError as error:
            self.error = error
        # Of the length that the others expect, whatever happened: they are told at the end.
        return data.ljust(length, b"\0")


class _Incoming:
    """What comes to this rank, into files."""

    def __init__(
        self, ranks: Collectives, parcels: Sequence[Parcel], sizes: dict[int, int]
    ) -> None:
        self._size = ranks.size
        self._error: OSError | None = None
        self._streams: dict[int, list[tuple[Path, int]]] = {}
        for i, parcel in enumerate(parcels):
            if parcel.target == ranks.rank:
                self._streams.setdefault(parcel.source, []).append((parcel.into, sizes[i]))
        for file, _ in (f for files in self._streams.values() for f in files):
            self._write(file, 0, memoryview(b""))

    def take(self, data: np.ndarray[tuple[int], np.dtype[np.uint8]], number: int) -> None:
        start, stop = number * _BLOCK, (number + 1) * _BLOCK
        left: memoryview = np.ascontiguousarray(data).data
        for source in range(self._size):
            at = 0
            for file, size in self._streams.get(source, ()):
                begin, end = max(start, at), min(stop, at + size)
                if begin < end:
                    self._write(file, begin - at, left[: end - begin])
                    left = left[end - begin :]
                at += size

    def _write(self, file: Path, offset: int, data: memoryview) -> None:
        if self._error is not None:
            return
        try:
            with file.open("r+b" if offset else "wb") as opened:
                opened.seek(offset)
                opened.write(data)
        except OSError as error:
            self._error = error

    def finish(self, sending: OSError | None) -> None:
        for error in (sending, self._error):
            if error is not None:
                raise error
