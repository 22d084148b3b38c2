"""Where the reduced gradients of a section lie: outside the heap, in one place.

In the heap, each of them would lie in the way when the room around it is wanted again, and the
heap would grow by several times their size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from zerohvd.layout import round_up
from zerohvd.torch import pages

# Less than this does no harm in the heap.
_WORTH_BYTES = 1 << 16

_ALIGNED = 64  # bytes: a processor's cache line


class ShardMemory:
    """Memory for this rank's shard of every bucket, as long as the gradients live."""

    def __init__(
        self,
        lengths: Sequence[int],
        dtypes: Sequence[torch.dtype],
        devices: Sequence[torch.device],
    ) -> None:
        """
        Args:
            lengths: Of the shards, one per bucket, as all the others.
        """
        self._lengths: dict[torch.dtype, list[int]] = {}
        self._places: dict[int, tuple[torch.dtype, int]] = {}
        for b, (length, dtype, device) in enumerate(zip(lengths, dtypes, devices, strict=True)):
            if device.type == "cpu":
                alike = self._lengths.setdefault(dtype, [])
                self._places[b] = dtype, len(alike)
                alike.append(length)
        self._memories: dict[torch.dtype, _Parts] = {}

    def of(self, b: int) -> torch.Tensor | None:
        """Memory for the shard of bucket `b`; None if the heap is as good."""
        dtype, index = self._places.get(b, (None, 0))
        if dtype is None or not self._is_outside(dtype):
            return None
        if dtype not in self._memories:
            self._memories[dtype] = _Parts(self._lengths[dtype], dtype)
        return self._memories[dtype].part(index)

    def drop(self) -> None:
        """Let others have the pages. What somebody still looks at stays as it is."""
        for dtype, memory in list(self._memories.items()):
            if memory.in_use:
                del self._memories[dtype]
            else:
                memory.range.free()

    @property
    def missing(self) -> int:
        """Bytes that will be needed for gradients that have not come yet."""
        outside = [dtype for dtype in self._lengths if self._is_outside(dtype)]
        there = [dtype for dtype, memory in self._memories.items() if memory.range.there]
        return sum(_nbytes(self._lengths[d], d) for d in outside if d not in there)

    def _is_outside(self, dtype: torch.dtype) -> bool:
        return pages.keeps_addresses() and _nbytes(self._lengths[dtype], dtype) >= _WORTH_BYTES


class _Parts:
    """One range of memory for all shards of a dtype."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.range = pages.Range(_nbytes(lengths, dtype), pages.POOL)
        whole = self.range.tensor.view(dtype)
        starts = itertools.accumulate((_padded(n, dtype) for n in lengths), initial=0)
        self._parts = [whole[a : a + n] for a, n in zip(starts, lengths, strict=False)]
        del whole
        self._users = pages.users(self.range.storage)

    def part(self, index: int) -> torch.Tensor:
        self.range.allocate()
        return self._parts[index][:]  # a view of its own: they are counted

    @property
    def in_use(self) -> bool:
        """Whether somebody else has a view of it."""
        return pages.users(self.range.storage) > self._users


def _padded(length: int, dtype: torch.dtype) -> int:
    return round_up(length, _ALIGNED // dtype.itemsize)


def _nbytes(lengths: Sequence[int], dtype: torch.dtype) -> int:
    return sum(_padded(n, dtype) for n in lengths) * dtype.itemsize
