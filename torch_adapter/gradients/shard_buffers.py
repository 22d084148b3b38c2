"""Memory for the reduced gradients of a section: one buffer, reused in every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from zerohvd.layout import round_up

_ALIGNED = 64  # bytes: a processor's cache line


class ShardBuffers:
    """One buffer per dtype and device for this rank's shards of all buckets.

    A fresh buffer costs a page fault for every page, in every step, and shards that are allocated
    one by one fragment the heap. So the buffer stays when the gradients are dropped, unless user
    code has seen them: gradients that a user keeps must not change in the next step.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        dtypes: Sequence[torch.dtype],
        devices: Sequence[torch.device],
    ) -> None:
        """
        Args:
            lengths: Elements of the shards, one per bucket, as all the others.
        """
        self._lengths = lengths
        self._groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for b, key in enumerate(zip(dtypes, devices, strict=True)):
            self._groups.setdefault(key, []).append(b)
        self._group_of = {b: key for key, buckets in self._groups.items() for b in buckets}
        self._shards: dict[int, torch.Tensor] = {}
        self.seen_by_user = False

    def shard(self, b: int) -> torch.Tensor:
        """Return memory for the shard of bucket `b`: 1-D, with undefined values."""
        if b not in self._shards:
            self._allocate(self._group_of[b])
        return self._shards[b]

    def _allocate(self, key: tuple[torch.dtype, torch.device]) -> None:
        (dtype, device), buckets = key, self._groups[key]
        lengths = [self._lengths[b] for b in buckets]
        padded = [round_up(n, _ALIGNED // dtype.itemsize) for n in lengths]
        buffer = torch.empty(sum(padded), dtype=dtype, device=device)
        starts = itertools.accumulate(padded, initial=0)
        for b, start, length in zip(buckets, starts, lengths, strict=False):
            self._shards[b] = buffer[start : start + length]

    def release(self, *, keep: bool = True) -> None:
        """Note that the gradients have been dropped: the next step may overwrite them."""
        if self.seen_by_user or not keep:
            self._shards = {}
        self.seen_by_user = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is allocated now, in use or not."""
        return list(self._shards.values())
