"""Model and optimizer in one call."""

from __future__ import annotations

from typing import Any

import torch

from zerohvd.torch.collectives import TorchCollectives
from zerohvd.torch.distributed import DistributedOptimizer
from zerohvd.torch.optimizer import ZeroOptimizer


def zeroify(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, stage: int = 2, **options: Any
) -> tuple[torch.nn.Module, ZeroOptimizer]:
    """Give all ranks the weights of the first one, and shard the optimizer.

    Args:
        model: The model; it stays the same object.
        optimizer: The plain torch optimizer of its parameters.
        stage: As for `DistributedOptimizer`.
        options: Any keyword of `DistributedOptimizer` but `named_parameters`.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if "named_parameters" in options:
        raise TypeError("zeroify() takes the names from the model: drop named_parameters")
    sharded = DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), stage=stage, **options
    )
    _broadcast(model, sharded)
    return model, sharded


def _broadcast(model: torch.nn.Module, opt: ZeroOptimizer) -> None:
    """After the layouts have been compared: ranks with other models get an error, not a hang."""
    collectives = opt.collectives
    if not isinstance(collectives, TorchCollectives):
        return
    flats = [flat for section in opt._sections for flat in section.flat.flats]
    for index, flat in enumerate(flats):
        collectives.broadcast_in_place(flat, name=f"zero/init/bucket{index}")
    sharded = {p for section in opt._sections for p in section.params}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and tensor not in sharded and tensor.numel():
            contiguous = tensor.detach().contiguous()
            collectives.broadcast_in_place(contiguous, name=f"zero/init/{name}")
            tensor.detach().copy_(contiguous)
