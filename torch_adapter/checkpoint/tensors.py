"""Torch tensors as the bytes of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from zerohvd.checkpoint import Array, Entry, TensorInfo
from zerohvd.layout import Span
from zerohvd.torch.communication import arrays
from zerohvd.torch.optimizer.offload import Offload


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor on the CPU; without a copy if it is contiguous."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits: np.ndarray = flat.contiguous().view(torch.uint8).numpy()
    return bits


def entry(
    kind: str, name: str, shape: tuple[int, ...], span: Span, tensor: torch.Tensor
) -> Entry:
    """A range of a tensor, to be stored. Its bytes leave the device when their turn comes."""
    dtype = arrays.dtype_name(tensor)
    here = tensor.device.type == "cpu"
    data: Any = raw(tensor) if here else lambda: raw(tensor.cpu())
    return Entry(kind, name, dtype, shape, span, data)


def whole_entry(kind: str, name: str, tensor: torch.Tensor) -> Entry:
    return entry(kind, name, tuple(tensor.shape), Span(0, tensor.numel()), tensor)


def to_array(value: Any) -> Array | None:
    """For `tree.encode`."""
    if not isinstance(value, torch.Tensor):
        return None
    return Array(arrays.dtype_name(value), tuple(value.shape), raw(value.cpu()), "torch")


def from_array(info: TensorInfo, data: np.ndarray) -> torch.Tensor:
    """For `Reader.decode`."""
    dtype = arrays.dtype_of(info.dtype)
    if not info.nbytes:  # torch refuses to view empty arrays as another dtype
        return torch.empty(info.shape, dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).reshape(info.shape)


class TorchStaging:
    """Implements `zerohvd.checkpoint.matching.Staging`: tensors on the CPU, or in files.

    Args:
        offload: Where the optimizer's state lives; on disk, so does what is read.
    """

    def __init__(self, offload: Offload | None) -> None:
        self._offload = offload

    def allocate(self, length: int, dtype: str, *, zeros: bool) -> torch.Tensor:
        if self._offload is not None and self._offload.on_disk:
            memory = self._offload.scratch(length, arrays.dtype_of(dtype))
            return memory.zero_() if zeros else memory
        make = torch.zeros if zeros else torch.empty
        return make(length, dtype=arrays.dtype_of(dtype), device="cpu")

    def destination(
        self, memory: torch.Tensor, stored: str, factor: float | None
    ) -> memoryview | Callable[[int, memoryview], None]:
        if arrays.dtype_name(memory) == stored and factor is None:
            return raw(memory).data
        dtype = arrays.dtype_of(stored)

        def take(start: int, block: memoryview) -> None:
            part = torch.frombuffer(block, dtype=torch.uint8).view(dtype)
            target = memory[start : start + part.numel()]
            if factor is None:
                target.copy_(part)
            else:
                target.add_(part.to(target.dtype), alpha=factor)

        return take
