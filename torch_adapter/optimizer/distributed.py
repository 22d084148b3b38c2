"""The drop-in for hvd.DistributedOptimizer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import horovod.torch as hvd
import torch

from zerohvd.communication.instances import report_failure
from zerohvd.communication.rounds import check_passes
from zerohvd.config import ZeroConfig
from zerohvd.errors import WaitTimeoutError
from zerohvd.torch import compat
from zerohvd.torch.communication.collectives import TorchCollectives, join
from zerohvd.torch.communication.packed.compression import Compression, policy_of, wires_of
from zerohvd.torch.optimizer.offload import Offload
from zerohvd.torch.optimizer.partition import choose_partition
from zerohvd.torch.optimizer.zero_optimizer import MakeUnits, ZeroOptimizer
from zerohvd.torch.params.naming import bucket_groups, groups_bucket_bytes, name_parameters
from zerohvd.torch.params.owned import check_free
from zerohvd.torch.stage3.deferred import is_deferred


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    *,
    stage: int = 2,
    param_compression: Any = Compression.none,
    bucket_bytes: int | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    master_dtype: torch.dtype | str | None = None,
    grad_clip: float | None = None,
    partition: str = "auto",
    offload: str | None = None,
    path: str | os.PathLike[str] | None = None,
    _units: MakeUnits | None = None,
) -> ZeroOptimizer:
    """Shard a torch optimizer over the ranks. Takes the place of `hvd.DistributedOptimizer`.

    Args:
        optimizer: The optimizer to wrap; it is changed and must not be used on its own any more.
        named_parameters: `model.named_parameters()`; names in errors, reports and checkpoints.
        compression: Gradients on the wire: `zero.Compression.none`, `.fp16`, `.bf16`, `.int8`,
            `.int4`, `.topk(ratio)` or `.randomk(ratio)`.
        backward_passes_per_step: Backward passes before each `step()`.
        op: `hvd.Average` or `hvd.Sum`.
        gradient_predivide_factor: Divide by this before the sum, and by the rest after it.
        num_groups: As `groups`.
        groups: A number of buckets, or lists of parameters that share buckets with no others.
        sparse_as_dense: Accepted; sparse gradients always travel as dense ones.
        process_set: Shard inside these ranks; the others train on their own.
        stage: 0: plain data parallelism; 1: sharded optimizer state; 2: and gradients. For 3,
            sharded parameters, call `zeroify`.
        param_compression: Parameters on the wire: `zero.Compression.none`, `.fp16`, `.bf16`,
            `.int8` or `.int4`.
        bucket_bytes: How many bytes travel together.
        reduce_dtype: Gradients travel in this dtype.
        master_dtype: The optimizer updates shards of this dtype; None: float32 for 16-bit
            parameters, their own otherwise.
        grad_clip: Clip to this global 2-norm in every step.
        partition: "flat", "parameter", or "auto" to choose by the optimizer.
        offload: "cpu": optimizer state and masters of parameters on a device live on the host;
            "disk": in memory-mapped files under `path`. None: with the parameters.
        path: A folder for the files of offload="disk".
    """
    with told_to_others(process_set):
        if isinstance(optimizer, ZeroOptimizer):
            raise ValueError("the optimizer is sharded already: wrap the plain one, once")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer)}")
        if compat.is_horovods(optimizer):
            raise ValueError(
                "the optimizer comes from hvd.DistributedOptimizer: give the plain torch optimizer"
            )
        if op not in (hvd.Average, hvd.Sum):
            raise ValueError("op must be hvd.Average or hvd.Sum; Adasum has no sharded form")
        if stage == 3 and _units is None:
            raise ValueError(
                "stage=3 shards the parameters themselves, so it needs the model: call "
                "model, optimizer = zero.zeroify(model, optimizer, stage=3) instead"
            )
        passes = check_passes(backward_passes_per_step)
        elsewhere = _offload(offload, path)
        collectives = join(process_set)
        groups_of = [list(g["params"]) for g in optimizer.param_groups]
        named = name_parameters(groups_of, named_parameters, is_deferred=is_deferred)
        if num_groups and groups is None:
            groups = num_groups
        for each in named:
            if each.param.requires_grad:
                check_free(each)
        named = bucket_groups(named, groups)
        if bucket_bytes is None:
            bucket_bytes = groups_bucket_bytes(named, groups)
        options = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        config = ZeroConfig(
            stage=stage,
            reduce_dtype=_dtype_name(reduce_dtype),
            master_dtype=_dtype_name(master_dtype),
            grad_clip=grad_clip,
            partition=choose_partition(optimizer, partition),
            compression=policy_of(compression),
            param_compression=policy_of(param_compression),
            **options,
        )
    return ZeroOptimizer(
        optimizer,
        named,
        collectives,
        config,
        wires=wires_of(config),
        average=op == hvd.Average,
        predivide=gradient_predivide_factor,
        passes=passes,
        units=_units,
        offload=elsewhere,
    )


@contextlib.contextmanager
def told_to_others(process_set: Any) -> Iterator[None]:
    """Raise on the other ranks, which go on to make their optimizers, if the block fails here."""
    try:
        yield
    except Exception:
        collectives = join(process_set) if hvd.is_initialized() else None
        if isinstance(collectives, TorchCollectives):
            with contextlib.suppress(WaitTimeoutError):  # they have ended: the error itself counts
                report_failure(collectives, collectives.process_set_id)
        raise


def _offload(where: str | None, path: str | os.PathLike[str] | None) -> Offload | None:
    if where is not None:
        return Offload(where, path)
    if path is not None:
        raise ValueError('path goes with offload="disk" only')
    return None


def _dtype_name(dtype: torch.dtype | str | None) -> str | None:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
