"""The tensor operations that the core's packing needs of torch."""

from __future__ import annotations

import torch

from zerohvd.torch.communication import arrays


def rows(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.view(-1, width)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)


def largest(rows: torch.Tensor) -> torch.Tensor:
    # As integers, floats without a sign keep their order, and NaN is the largest: that is twice as
    # fast as the maximum of floats, which looks for NaN.
    return rows.abs().view(torch.int32).amax(1).view(torch.float32)


def inverse(scales: torch.Tensor, least: float) -> torch.Tensor:
    return torch.where(scales >= least, scales.reciprocal(), 0.0)


def encode(rows: torch.Tensor, factors: torch.Tensor, offset: float) -> torch.Tensor:
    start = torch.full((), offset, device=rows.device)
    return torch.addcmul(start, rows, factors.unsqueeze(1)).to(torch.uint8)


def decode(codes: torch.Tensor, factors: torch.Tensor, offset: float) -> torch.Tensor:
    return codes.to(torch.float32).sub_(offset).mul_(factors.unsqueeze(1))


def join_halves(codes: torch.Tensor) -> torch.Tensor:
    low, high = codes.chunk(2, 1)
    return (high << 4).bitwise_or_(low)


def split_halves(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat([codes & 15, codes >> 4], 1)


def to_bytes(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(arrays.dtype_of(dtype)).contiguous().view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: str) -> torch.Tensor:
    wanted = arrays.dtype_of(dtype)
    if data.storage_offset() % wanted.itemsize:
        data = data.clone()
    return data.view(wanted)


def float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32)


def pad(x: torch.Tensor, length: int) -> torch.Tensor:
    return x if x.numel() == length else torch.nn.functional.pad(x, (0, length - x.numel()))


def concat(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def top(x: torch.Tensor, count: int) -> torch.Tensor:
    # As integers: NaN is the largest.
    sizes = x.abs().view(torch.int32)
    return sizes.topk(count, sorted=False).indices.to(torch.int32)


def take(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, places)


def put(values: torch.Tensor, places: torch.Tensor, length: int) -> torch.Tensor:
    return values.new_zeros(length).index_put_((places.to(torch.int64),), values)


def column(rows: torch.Tensor, index: int) -> torch.Tensor:
    return rows[:, index]


def with_column(values: torch.Tensor, index: int, width: int) -> torch.Tensor:
    made = values.new_zeros(values.numel(), width)
    made[:, index] = values
    return made.view(-1)


def finite_or_zero(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num_(0.0, 0.0, 0.0)


def where_zero(of: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(of == 0, x, 0.0)
