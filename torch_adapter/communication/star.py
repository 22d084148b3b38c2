"""Tensors over the core's connections between one rank and all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zerohvd.peers.star import StarCollectives


class TorchStar:
    """What collecting sharded tensors needs of collectives; any dtype travels as its bytes."""

    def __init__(self, star: StarCollectives) -> None:
        self._star = star
        self.rank, self.size = star.rank, star.size

    def allgather_object(self, value: Any, *, name: str) -> list[Any]:
        return self._star.allgather_object(value, name=name)

    def allgather(self, x: torch.Tensor, *, name: str) -> torch.Tensor:
        raise NotImplementedError("only the rank that asks gets what the others have")

    def alltoall(self, x: torch.Tensor, splits: Sequence[int], *, name: str) -> torch.Tensor:
        raw = x.detach().cpu().contiguous().view(torch.uint8).numpy()
        item = x.element_size()
        received = self._star.alltoall(raw, [n * item for n in splits], name=name)
        whole = torch.empty(len(received) // item, dtype=x.dtype, device="cpu")
        whole.view(torch.uint8).copy_(torch.from_numpy(received))
        return whole

    def collect(self, part: torch.Tensor, to: int, *, name: str) -> torch.Tensor:
        """The parts of all ranks, 1-D, in rank order on rank `to`; nothing elsewhere."""
        splits = [0] * self.size
        splits[to] = len(part)
        return self.alltoall(part, splits, name=name)
