"""Where the reduced gradients of a section lie: outside the heap, in one place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerohvd.torch.pages import LIBC, Lasting

# Less than this does no harm in the heap.
_WORTH_BYTES = 1 << 16


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
            if device.type == "cpu" and LIBC is not None:
                alike = self._lengths.setdefault(dtype, [])
                self._places[b] = dtype, len(alike)
                alike.append(length)
        self._memories: dict[torch.dtype, Lasting] = {}

    def of(self, b: int) -> torch.Tensor | None:
        """Memory for the shard of bucket `b`; None if the heap is as good."""
        dtype, index = self._places.get(b, (None, 0))
        if dtype is None or dtype.itemsize * sum(self._lengths[dtype]) < _WORTH_BYTES:
            return None
        if dtype not in self._memories:
            self._memories[dtype] = Lasting(self._lengths[dtype], dtype)
        return self._memories[dtype].parts[index]

    def drop(self) -> None:
        """Give the pages back. What somebody still looks at stays as it is."""
        for dtype, memory in list(self._memories.items()):
            if memory.in_use:
                del self._memories[dtype]
            else:
                memory.drop()
