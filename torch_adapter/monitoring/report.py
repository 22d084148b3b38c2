"""What this rank holds and what it has moved, counted exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerohvd.communication.log import CommunicationReport
from zerohvd.memory import MemoryReport
from zerohvd.torch import compat
from zerohvd.torch.communication import arrays
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer
from zerohvd.torch.params.owned import units_of


def memory_report(opt: ZeroOptimizer) -> MemoryReport:
    """Bytes held on this rank now: params, grads, optimizer, master, buffers and their total."""
    _check(opt)
    seen: set[int] = set()
    gathered = _gathered(opt)
    params = _bytes(_params(opt), seen)
    masters = [copy for s in opt.sections for copy in s.copies()]
    master = _bytes(_in_memory(opt, masters), seen)
    held = [t for s in opt.sections for t in [*s.reducer.gradients(), *s.local.tensors()]]
    grads = _bytes(held, seen)
    scratch = _bytes((t for s in opt.sections for t in s.reducer.scratch()), seen)
    return MemoryReport(
        params=params,
        grads=grads,
        optimizer=_bytes(_in_memory(opt, arrays.tensors_in(opt.inner.state.values())), seen),
        master=master,
        buffers=scratch + gathered,
    )


def communication_report(opt: ZeroOptimizer) -> CommunicationReport:
    """Bytes and calls per collective of the latest step, or of the one under way."""
    _check(opt)
    return CommunicationReport(opt.collectives.log.totals())


def _in_memory(opt: ZeroOptimizer, tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Without those that are in files, and in memory only while they are being updated."""
    return (t for t in tensors if opt.offload is None or not opt.offload.holds(t))


def _params(opt: ZeroOptimizer) -> Iterable[torch.Tensor]:
    """What is there of the parameters for good."""
    flats = [s.flat for s in opt.sections]
    units = [] if opt.units is None else opt.units.all
    flats += [part for unit in units for part in unit.parts]
    for flat in flats:
        yield from flat.held()
    yield from (p for p in opt.all_params() if units_of(p) is None)


def _gathered(opt: ZeroOptimizer) -> int:
    """Bytes of gathered units."""
    if opt.units is None:
        return 0
    parts = (part for unit in opt.units.all for part in unit.parts)
    return sum(part.gathered_nbytes for part in parts)


def _check(opt: Any) -> None:
    if not isinstance(opt, ZeroOptimizer):
        raise TypeError(
            f"expected an optimizer made by zero.DistributedOptimizer, got {type(opt).__name__}"
        )


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Memory behind `tensors`, each allocation once."""
    total = 0
    for tensor in tensors:
        if tensor.is_sparse:
            total += _bytes(compat.sparse_parts(tensor), seen)
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
