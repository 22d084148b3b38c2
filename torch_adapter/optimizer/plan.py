"""Memory and time before the run, and the stage that fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from zerohvd.config import ZeroConfig
from zerohvd.planning import network as networks
from zerohvd.planning.plan import Plan, make_plan
from zerohvd.stage3.planning import PERSIST_BELOW, UnitOptions
from zerohvd.torch.communication import arrays
from zerohvd.torch.optimizer.partition import choose_partition
from zerohvd.torch.planning.micro_step import Loss
from zerohvd.torch.planning.workload import describe


def plan(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    ranks: int | Sequence[int] | None = None,
    memory: str | float | None = None,
    batch: Any = None,
    loss: Loss | None = None,
    device: str | torch.device | None = None,
    network: networks.Network | str | Path | None = None,
    compute: float | None = None,
    units: Any = None,
    persist_below: int = PERSIST_BELOW,
    bucket_bytes: int | None = None,
    partition: str = "auto",
    master_dtype: torch.dtype | str | None = None,
) -> Plan:
    """What every stage will hold and move per rank, before anything is sharded.

    Nothing is allocated and nothing is sent: the model may be on the meta device, and larger than
    this machine. `print(zero.plan(...))` shows it; `.stage` is the stage to choose.

    Args:
        model: Not sharded yet.
        optimizer: The plain optimizer of its parameters.
        ranks: Numbers of ranks; Horovod's unless given.
        memory: What a rank may hold: "16GiB", "40GB" or bytes.
        batch: What the model is called with in one micro-step on one rank: a tensor, a tuple of
            arguments or a dict of keywords; only shapes and dtypes count. Activations are measured
            with it: the model's forward and backward pass run once, on tensors without memory.
        loss: Of the model's output; unless given, its `loss`, or the sum of its first tensor.
        device: Whose kernels are measured; that of the parameters unless given.
        network: For the time of a step: a file of `zerohvd doctor --bandwidth`, or a Network.
        compute: Seconds that a step takes without communication.
        units, persist_below: As for `zeroify`.
        bucket_bytes, partition, master_dtype: As for `DistributedOptimizer`.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer)}")
    if isinstance(master_dtype, torch.dtype):
        master_dtype = arrays.dtype_name(master_dtype)
    config = ZeroConfig(
        partition=choose_partition(optimizer, partition),
        master_dtype=master_dtype,
        **({} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}),
    )
    options = UnitOptions(units=units, persist_below=persist_below)
    workload = describe(
        model, optimizer, config, options, batch=batch, loss=loss, device=device
    )
    if ranks is None:
        ranks = hvd.size() if hvd.is_initialized() else 1
    return make_plan(
        workload,
        [ranks] if isinstance(ranks, int) else list(ranks),
        memory=memory,
        network=networks.load(network) if isinstance(network, (str, Path)) else network,
        compute=compute,
    )
