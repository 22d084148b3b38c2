"""Asynchronous collectives on flat torch tensors, into memory that the caller owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from zerohvd.collectives import HorovodCollectives, SingleProcess
from zerohvd.commlog import CommLog
from zerohvd.torch import arrays


class Handle(Protocol):
    """Something under way."""

    def wait(self) -> None: ...


class _Done:
    """Nothing was under way."""

    def wait(self) -> None:
        return


class _HorovodHandle:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def wait(self) -> None:
        mpi_ops.synchronize(self._handle)


def _wire(x: torch.Tensor) -> torch.Tensor:
    """The view of `x` that Horovod can carry."""
    return arrays.bits(x) if x.dtype == torch.bfloat16 else x


class TorchCollectives(HorovodCollectives):
    """Horovod for flat tensors, asynchronous and without allocating results.

    Horovod's public calls allocate an output per call, and fresh pages cost more than moving the
    data. The calls underneath take the output; an exact-size contiguous one is filled in place.
    """

    def __init__(self, process_set: Any = None) -> None:
        super().__init__(hvd, process_set)

    def exchange_start(
        self, x: torch.Tensor, lengths: Sequence[int], out: torch.Tensor, *, name: str
    ) -> Handle:
        """The first half of a reducescatter: send part r of `x` (its length is `lengths[r]`) to
        each rank r; `out` receives this rank's part of every rank, in rank order.

        The other half is the caller's sum over the parts. Together they move the bytes of a
        reducescatter, which is what the log says, but add in any precision, in rank order, carry
        bfloat16, and are faster than MPI's own reducescatter on large buffers.
        """
        moved = (x.numel() - lengths[self.rank]) * x.element_size()
        self._note(name, "reducescatter", x, moved=moved)
        splits = torch.tensor(lengths, dtype=torch.int32)
        received = torch.empty(self.size, dtype=torch.int32)
        handle = mpi_ops._alltoall_async(_wire(x), splits, _wire(out), received, name, self._set)
        return _HorovodHandle(handle)

    def allgather_start(self, x: torch.Tensor, out: torch.Tensor, *, name: str) -> Handle:
        """Concatenate the ranks' `x` in `out`. The two must not share memory."""
        moved = x.numel() * x.element_size() * (self.size - 1)
        self._note(name, "allgather", out, moved=moved)
        handle = mpi_ops._allgather_async(_wire(x), _wire(out), name, self._set)
        return _HorovodHandle(handle)

    def allreduce_start(self, x: torch.Tensor, op: str = "sum", *, name: str) -> Handle:
        """Combine in place. Not for bfloat16."""
        self._note(name, "allreduce", x)
        handle = mpi_ops.allreduce_async_(x, op=self._ops[op], name=name, process_set=self._set)
        return _HorovodHandle(handle)


class LocalCollectives(SingleProcess):
    """The same calls for a rank on its own: one process, or outside the process set."""

    def __init__(self) -> None:
        super().__init__()
        self.log = CommLog(1)

    def exchange_start(
        self, x: torch.Tensor, lengths: Sequence[int], out: torch.Tensor, *, name: str
    ) -> Handle:
        out.copy_(x)
        return _Done()

    def allgather_start(self, x: torch.Tensor, out: torch.Tensor, *, name: str) -> Handle:
        out.copy_(x)
        return _Done()

    def allreduce_start(self, x: torch.Tensor, op: str = "sum", *, name: str) -> Handle:
        return _Done()

    from_numpy = staticmethod(arrays.from_numpy)
    to_numpy = staticmethod(arrays.to_numpy)


def join(process_set: Any = None) -> TorchCollectives | LocalCollectives:
    """The collectives of this rank in `process_set` (all ranks unless given)."""
    if not hvd.is_initialized():
        raise RuntimeError("Horovod is not initialised: call horovod.torch.init() first")
    members = hvd.global_process_set if process_set is None else process_set
    if members.process_set_id is None:
        raise ValueError(
            f"process_set {members} is not registered: pass it to hvd.init(process_sets=[...]) "
            "or hvd.add_process_set() first"
        )
    if not members.included() or members.size() == 1:
        return LocalCollectives()
    return TorchCollectives(members)
