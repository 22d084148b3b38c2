"""Memory and time before the run, and the stage that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from zerohvd.config import ZeroConfig
from zerohvd.planning import network as networks
from zerohvd.planning.plan import Plan, make_plan
from zerohvd.planning.workload import PRECISIONS, Wishes, Workload
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
    if isinstance(units, torch.nn.ModuleList):
        units = list(units)
    config = ZeroConfig(
        partition=choose_partition(optimizer, partition), master_dtype=master_dtype
    )
    if bucket_bytes is not None:
        config = dataclasses.replace(config, bucket_bytes=bucket_bytes)
    options = UnitOptions(units=units, persist_below=persist_below)
    found = describe(model, optimizer, config, options, batch=batch, loss=loss, device=device)
    if ranks is None:
        ranks = hvd.size() if hvd.is_initialized() else 1
    return make_plan(found, ranks, memory=memory, network=network, compute=compute)


# -- for the command line --------------------------------------------------------------------------


def workload(make: Callable[[], Any], wishes: Wishes) -> Workload:
    """Describe the model that `make` returns, built on the meta device."""
    with torch.device("meta"):
        made = make()
    model, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"expected a function that returns a torch.nn.Module, or a module and its optimizer; "
            f"it returned {type(made).__name__}"
        )
    master = None
    if wishes.precision not in (None, "fp32"):
        dtype, master = PRECISIONS[wishes.precision]
        model = model.to(arrays.dtype_of(dtype))
    if optimizer is None:
        optimizer = _optimizer(wishes.optimizer, model)
    config = ZeroConfig(partition=choose_partition(optimizer, "auto"), master_dtype=master)
    batch = None if wishes.batch is None else _batch(model, wishes.batch, wishes.batch_dtype)
    return describe(model, optimizer, config, UnitOptions(), batch=batch, loss=wishes.loss)


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    known = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    known.pop("optimizer", None)
    if name not in known:
        raise ValueError(f"optimizer must be one of momentum, {', '.join(known)}, got {name!r}")
    kind: Any = known[name]
    made: torch.optim.Optimizer = kind(model.parameters(), lr=1e-3)
    return made


def _batch(model: torch.nn.Module, shape: tuple[int, ...], dtype: str | None) -> torch.Tensor:
    """What the model is called with: numbers of tokens if it begins with an embedding."""
    if dtype is not None:
        return torch.empty(shape, dtype=arrays.dtype_of(dtype), device="meta")
    modules = [m for m in model.modules() if list(m.parameters(recurse=False))]
    tokens = modules and isinstance(modules[0], (torch.nn.Embedding, torch.nn.EmbeddingBag))
    param = next(iter(model.parameters()), None)
    kind = torch.int64 if tokens or param is None else param.dtype
    return torch.empty(shape, dtype=kind, device="meta")
