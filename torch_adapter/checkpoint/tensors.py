"""Torch tensors as the bytes of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from zerohvd.checkpoint import Array, Entry, TensorInfo
from zerohvd.layout import Span
from zerohvd.torch.communication import arrays


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
    flat = torch.from_numpy(data).view(arrays.dtype_of(info.dtype))
    return flat.reshape(info.shape)


def destination(
    tensor: torch.Tensor, stored: str, *, add: float | None = None
) -> memoryview | Callable[[int, memoryview], None]:
    """Where elements of dtype `stored` go so that they arrive in the 1-D `tensor`.

    Args:
        tensor: 1-D and contiguous.
        stored: dtype in the checkpoint.
        add: Do not overwrite: add this many times the stored values.
    """
    same = arrays.dtype_name(tensor) == stored and tensor.device.type == "cpu"
    if same and add is None:
        return memoryview(raw(tensor))
    dtype = arrays.dtype_of(stored)

    def take(start: int, block: memoryview) -> None:
        part = torch.frombuffer(block, dtype=torch.uint8).view(dtype)
        target = tensor.detach()[start : start + part.numel()]
        if add is None:
            target.copy_(part)
        else:
            target.add_(part.to(target.device, target.dtype), alpha=add)

    return take
