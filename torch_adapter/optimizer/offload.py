"""Optimizer state and masters elsewhere: in the host's memory, or in files."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from zerohvd.torch.gradients.section import Section
from zerohvd.torch.params.owned import OwnedPiece
from zerohvd.training.mapped_file import map_unnamed


class Offload:
    """Where the optimizer's tensors live when they are not in use.

    Args:
        where: "cpu": masters and state of parameters on a device are in the host's memory, and the
            inner optimizer runs there. Parameters in the host's memory stay where they are.
            "disk": in memory-mapped files. The inner optimizer runs section by section, and pages
            are dropped after each, so that one section's state is in memory at a time.
        path: For "disk": a folder with room for this rank's share, best on a local disk. The files
            have no names there, and vanish with the process.
    """

    def __init__(self, where: str, path: str | os.PathLike[str] | None = None) -> None:
        if where not in ("cpu", "disk"):
            raise ValueError(f'offload must be "cpu", "disk" or None, got {where!r}')
        if where == "disk" and path is None:
            raise ValueError('offload="disk" needs path=..., a folder for the files')
        if where == "cpu" and path is not None:
            raise ValueError('path goes with offload="disk" only')
        self.on_disk = where == "disk"
        self._folder = None if path is None else Path(path)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        # By the address of a mapping. It goes with the last tensor that uses it, and its file too.
        self._mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()

    # -- memory -----------------------------------------------------------------------------------

    def master(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory the optimizer updates in the place of `shard`; None: `shard` itself."""
        if self.on_disk:
            return None if dtype == shard.dtype else self._file(shard.numel(), dtype).copy_(shard)
        same = dtype == shard.dtype and shard.device.type == "cpu"
        if same:
            return None
        # Page-locked, so that updated values go back to the device while others are updated.
        memory = torch.empty(shard.shape, dtype=dtype, device="cpu", pin_memory=shard.is_cuda)
        return memory.copy_(shard)

    def _file(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        tensor, mapping = self._map(count, dtype)
        self._mappings[tensor.untyped_storage().data_ptr()] = mapping
        return tensor

    def scratch(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in a file that goes with the tensor; no state of the optimizer yet."""
        return self._map(count, dtype)[0]

    def _map(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, mmap.mmap]:
        assert self._folder is not None
        size = max(1, count) * dtype.itemsize
        mapping = map_unnamed(self._folder, size, "optimizer state")
        return torch.frombuffer(mapping, dtype=dtype)[:count], mapping

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in a file, and not in memory."""
        return tensor.untyped_storage().data_ptr() in self._mappings

    # -- updating ---------------------------------------------------------------------------------

    def absorb(self, inner: torch.optim.Optimizer, section: Section) -> None:
        """Move new state into files, and drop what is there from memory."""
        if not self.on_disk:
            return
        for key, pieces in self._in_memory(inner, section).items():
            dtype = inner.state[pieces[0].tensor][key].dtype
            file = self._file(sum(p.tensor.numel() for p in pieces), dtype)
            parts = file.split([p.tensor.numel() for p in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                held = inner.state[piece.tensor]
                part.copy_(held[key].reshape(-1))
                held[key] = part.view(held[key].shape)
        for tensor in self._mapped(inner, section):
            self._drop(tensor)

    def _in_memory(
        self, inner: torch.optim.Optimizer, section: Section
    ) -> dict[str, list[OwnedPiece]]:
        """Per key of the state: the pieces whose tensor is not in a file yet."""
        found: dict[str, list[OwnedPiece]] = {}
        for owned in section.owned:
            for key, value in inner.state.get(owned.tensor, {}).items():
                elementwise = isinstance(value, torch.Tensor) and value.shape == owned.tensor.shape
                if elementwise and value.dim() and not self.holds(value):
                    found.setdefault(f"{key}", []).append(owned)
        return found

    def _mapped(
        self, inner: torch.optim.Optimizer, section: Section
    ) -> Iterator[torch.Tensor]:
        yield from (m for m in section.masters if m is not None)
        for owned in section.owned:
            yield from _tensors(inner.state.get(owned.tensor, {}).values())

    def _drop(self, tensor: torch.Tensor) -> None:
        """Give the pages back; the file keeps the values."""
        mapping = self._mappings.get(tensor.untyped_storage().data_ptr())
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    yield from (v for v in values if isinstance(v, torch.Tensor))
