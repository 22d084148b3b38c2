"""The tensor operations that the core's collectives need of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

# Where NCCL carries tensors, which knows no 16-bit integers: there bfloat16 travels as bytes.
BYTES_ON = frozenset({"cuda"})


OWN_DEVICE = (
    "torch.cuda.set_device(hvd.local_rank()) after hvd.init(), and model.cuda() after it; or one "
    "GPU per rank by CUDA_VISIBLE_DEVICES, as `srun --gpus-per-task=1` does"
)


def device_id(device: torch.device) -> str | None:
    """The same text for the same GPU of a host; None: the host itself; "": not known."""
    if device.type != "cuda":
        return "" if device.type == "meta" else None
    # Ranks may see different GPUs under the same number.
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if found is None else f"GPU {found}"


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
    """The memory of a bfloat16 tensor as integers that the transport knows.

    An element becomes a row of two bytes, or a 16-bit integer: either way there are as many rows,
    by which an alltoall counts what goes where.
    """
    if x.device.type in BYTES_ON:
        return x.unsqueeze(-1).view(torch.uint8)
    return x.view(torch.int16)


def unbits(x: torch.Tensor) -> torch.Tensor:
    """The reverse."""
    found = x.view(torch.bfloat16)
    return found.squeeze(-1) if x.dtype == torch.uint8 else found


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
    # Horovod reads them on the host, whatever the default device is.
    return torch.tensor(list(lengths), dtype=torch.int32, device="cpu")


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
