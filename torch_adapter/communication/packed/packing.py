"""Packed tensors: part by part, and the collectives that carry them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from zerohvd.communication.collectives import Handle
from zerohvd.compression.codecs import Codec
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.communication.packed import operations

# Elements that are packed at a time: what is made on the way stays in the processor's cache. A
# multiple of every codec's blocks, so that the bytes of a tensor are those of its parts.
CHUNK = 1 << 17


class Chunk(NamedTuple):
    """A part of a tensor, and where its bytes lie."""

    start: int
    stop: int
    data: torch.Tensor  # uint8

    @property
    def length(self) -> int:
        return self.stop - self.start


def nbytes(codec: Codec, count: int) -> int:
    """How many bytes a tensor of so many elements becomes."""
    full, rest = divmod(count, CHUNK)
    return full * codec.nbytes(CHUNK) + (codec.nbytes(rest) if rest else 0)


def chunks(codec: Codec, count: int, data: torch.Tensor) -> Iterator[Chunk]:
    """The parts of a tensor of `count` elements that is packed in `data`, or is going to be."""
    at = 0
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        size = codec.nbytes(stop - start)
        yield Chunk(start, stop, data[at : at + size])
        at += size


def pack(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """A 1-D tensor of any real dtype as bytes."""
    data = torch.empty(nbytes(codec, x.numel()), dtype=torch.uint8, device=x.device)
    for chunk in chunks(codec, x.numel(), data):
        part = x[chunk.start : chunk.stop].to(torch.float32)
        chunk.data.copy_(codec.pack(operations, part, 0))
    return data


def unpack(codec: Codec, data: torch.Tensor, into: torch.Tensor, *, add: bool) -> None:
    """Write the numbers in `data` into the 1-D `into`, or add them."""
    for chunk in chunks(codec, into.numel(), data):
        values = codec.unpack(operations, chunk.data, chunk.length, 0)
        part = into[chunk.start : chunk.stop]
        part.add_(values) if add else part.copy_(values)


class Then:
    """A handle: once the collective is over, whoever waits does the rest."""

    def __init__(self, handle: Handle, rest: Callable[[], None]) -> None:
        self._handle = handle
        self._rest: Callable[[], None] | None = rest

    def done(self) -> bool:
        """Whether the collective is over: `wait` has then nothing to wait for."""
        return self._handle.done()

    def wait(self) -> None:
        self._handle.wait()
        rest, self._rest = self._rest, None
        if rest is not None:
            rest()


def gather_start(
    collectives: TorchCollectives | LocalCollectives,
    codec: Codec,
    own: torch.Tensor,
    into: torch.Tensor,
    lengths: Sequence[int],
    *,
    name: str,
    add: bool = False,
) -> Then:
    """Allgather `own` packed. Every rank, the owner too, unpacks all parts: they stay equal.

    Args:
        own: This rank's numbers, 1-D.
        into: 1-D, for the numbers of all ranks, `lengths` long.
        add: Add them to what is there.
    """
    sizes = [nbytes(codec, length) for length in lengths]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=into.device)
    handle = collectives.gather_into(data, pack(codec, own), sizes, name=name)

    def rest() -> None:
        for packed, part in zip(data.split(sizes), into.split(list(lengths)), strict=True):
            unpack(codec, packed, part, add=add)

    return Then(handle, rest)
