"""What this rank holds, and what the last step moved."""

from __future__ import annotations

from typing import Any

from zerohvd.communication.log import CommunicationReport
from zerohvd.keras import compat
from zerohvd.keras.communication.arrays import nbytes
from zerohvd.keras.optimizer import state
from zerohvd.keras.optimizer.distributed import unwrap
from zerohvd.memory import MemoryReport
from zerohvd.training.graph import IN_FLIGHT


def _built(optimizer: Any) -> Any:
    found = unwrap(getattr(optimizer, "optimizer", optimizer))
    if found is None:
        raise TypeError(
            f"expected a zero.DistributedOptimizer or a model compiled with one, got {optimizer!r}"
        )
    if found.step is None:
        raise ValueError(
            "the optimizer is not built yet: train a step, or call "
            "opt.build(model.trainable_variables)"
        )
    return found


def memory_report(optimizer: Any) -> MemoryReport:
    """Bytes on this rank, for an optimizer or the model that was compiled with it.

    `params` are the variables the optimizer manages, `optimizer` its slots and scalars, `master`
    the float32 shards of 16-bit variables, and what variables that travel packed differ by from
    the exact ones. TensorFlow frees a gradient inside the step, so
    `grads` are sums kept by `gradient_accumulation_steps`. `buffers` are the largest buckets that
    a step has in flight at once; at stage 3 the variables that are gathered at once: the root's and
    two units'. What has not travelled of packed gradients is there too.
    """
    optimizer = _built(optimizer)
    step = optimizer.step
    slots = state.slot_bytes(optimizer)
    sums = slots.pop(compat.ACCUMULATED, 0)
    sums += sum(nbytes(s) for s in step.local_sums)
    scalars = sum(nbytes(v) for v in state.scalars(optimizer).values())
    largest = sorted((b.nbytes for b in step.layout.buckets), reverse=True)
    in_flight = sum(largest[:IN_FLIGHT]) if step.wire.size > 1 else 0
    if optimizer.sharded is not None:
        in_flight = optimizer.sharded.units.peak_nbytes
    left = [p.left_over for p in step.pieces if p.left_over is not None]
    waiting = [] if step.wire.packing is None else step.wire.packing.variables
    return MemoryReport(
        params=sum(nbytes(v) for v in step.natives),
        grads=sums,
        master=slots.pop(state.MASTER, 0) + sum(nbytes(v) for v in left),
        optimizer=sum(slots.values()) + scalars,
        buffers=in_flight + sum(nbytes(v) for v in waiting),
    )


def communication_report(optimizer: Any) -> CommunicationReport:
    """Calls and bytes sent per operation in the most recent step on this rank."""
    optimizer = _built(optimizer)
    log = optimizer.step.wire.traffic.log()
    if optimizer.sharded is not None:
        optimizer.sharded.units.moved.add_to(log)
    return log.report()
