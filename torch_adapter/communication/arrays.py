"""The tensor operations that the core's collectives need of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch


def dtype_name(x: torch.Tensor | torch.dtype) -> str:
    """The name the core uses, e.g. "float32"."""
    dtype = x if isinstance(x, torch.dtype) else x.dtype
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def numel(x: torch.Tensor) -> int:
    return x.numel()


def itemsize(x: torch.Tensor) -> int:
    return x.element_size()


def storage_of(x: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory behind a tensor; None for a wrapper without any, as torch.func makes."""
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers that every transport knows.

    bytes on CUDA, because NCCL has no 16-bit integers; 16-bit integers elsewhere.
    """
    if x.device.type == "cuda":
        return x.unsqueeze(-1).view(torch.uint8) if x.dim() == 0 else x.view(torch.uint8)
    return x.view(torch.int16)


def unbits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.bfloat16)


def float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32)


def bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


def flatten(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)


def reshape_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.reshape(like.shape)


def sum_parts(x: torch.Tensor, n: int) -> torch.Tensor:
    """The sum, in order, of `n` equal parts lying one behind the other."""
    parts = x.reshape(n, -1, *x.shape[1:])
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def splits(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(lengths), dtype=torch.int32)


def from_numpy(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
