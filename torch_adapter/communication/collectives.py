"""Asynchronous collectives on flat torch tensors, into memory that the caller owns."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from zerohvd import limits
from zerohvd.communication.collectives import (
    Done,
    Handle,
    HorovodCollectives,
    SingleProcess,
    check_registered,
)
from zerohvd.communication.hosts import Grid
from zerohvd.peers.stalls import Whereabouts, warn
from zerohvd.rank_count import check_ranks
from zerohvd.torch import compat
from zerohvd.torch.communication import arrays, two_steps


class _HorovodHandle:
    def __init__(
        self, collectives: TorchCollectives, name: str, handle: int, *alive: torch.Tensor
    ) -> None:
        self._collectives, self._name = collectives, name
        self._handle = handle
        self._alive = alive  # memory that the collective still reads

    def wait(self) -> Any:
        """Return what the collective gives; Horovod itself would wait without a limit."""
        c = self._collectives
        waited = 0.0
        if not self.done():
            with c.log.waiting(self._name):
                waited = limits.wait(self.done, self._late, self.warn)
        with c.explained(self._name, waited):
            result = mpi_ops.synchronize(self._handle)
        c.whereabouts.ended(self._name)
        c.log.ended(self._name)
        self._alive = ()
        return result

    def warn(self, waited: float) -> None:
        """Say what has not come after `waited` seconds, and who is missing."""
        c = self._collectives
        warn(c.whereabouts, self._name, c.rank, c.members, c.hosts, waited)

    def _late(self, waited: float) -> Exception:
        c = self._collectives
        missing = c.whereabouts.who_is_missing(self._name, c.members, c.hosts)
        what = limits.in_words(self._name)
        return limits.timed_out(c.members[c.rank], c.members, what, waited, missing)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return compat.is_done(self._handle)


class Exchange(NamedTuple):
    """A reducescatter under way: the caller adds up `parts` when the handle has been waited for."""

    handle: Handle
    parts: Sequence[torch.Tensor]  # this rank's part from every rank, in rank order
    scratch: torch.Tensor  # the memory that was allocated for it


def _wire(x: torch.Tensor) -> torch.Tensor:
    """The view of `x` that Horovod can carry."""
    if x.dtype == torch.bfloat16:
        return arrays.bits(x)
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    return torch.view_as_real(x) if x.is_complex() else x


class TorchCollectives(HorovodCollectives):
    """Horovod for flat tensors, asynchronous and with as few copies as can be.

    Horovod's public calls allocate an output per call, and fresh pages cost more than moving the
    data. The calls underneath take the output; an exact-size contiguous one is filled in place.
    """

    def __init__(self, process_set: Any = None, *, native: bool | None = None) -> None:
        """
        Args:
            process_set: The ranks that take part; all of them unless given.
            native: Use Horovod's own reducescatter where it fits; by default for GPUs, where
                NCCL's is the fastest.
        """
        super().__init__(hvd, arrays, process_set)
        self._native = native
        self.by_nccl = bool(hvd.nccl_built())  # tensors on GPUs; those of the host never are
        self.process_set_id: int = self._set.process_set_id
        self.whereabouts = Whereabouts(self.log)

    def exchange_start(
        self,
        x: torch.Tensor,
        lengths: Sequence[int],
        *,
        name: str,
        into: torch.Tensor | None = None,
    ) -> Exchange:
        """A reducescatter without the final sum: part r of `x`, `lengths[r]` long, goes to rank r.

        Leaving the sum to the caller allows any precision, a fixed order and bfloat16, and is
        faster than MPI's own reducescatter on large buffers. The bytes moved are the same.

        Args:
            into: Memory for one part, where the sum will stay. It becomes the `scratch` if what is
                received is no larger.
        """
        own = lengths[self.rank]
        into = None if into is None or into.dtype != x.dtype else into
        self._note(name, "reducescatter", x, moved=(x.numel() - own) * x.element_size())
        if self._use_native(x, lengths):
            out = x.new_empty(own) if into is None else into
            return Exchange(self._start(compat.reducescatter_start, name, x, out), [out], out)
        if self.size == 2:
            return self._exchange_with_other(x, lengths, name, into)
        grid = self._grid_of(x)
        if grid is not None:
            return Exchange(
                *two_steps.scatter_start(
                    self._alltoall_start, grid, x, lengths, self.rank, name, into
                )
            )
        out = x.new_empty(self.size * own)
        handle = self._alltoall_start(x, lengths, out, name)
        return Exchange(handle, out.view(self.size, own).unbind(), out)

    def _exchange_with_other(
        self, x: torch.Tensor, lengths: Sequence[int], name: str, into: torch.Tensor | None
    ) -> Exchange:
        """Of two ranks, each sends only what the other one needs: its own part stays in place."""
        first, second = x.split(list(lengths))
        own, others = (first, second) if self.rank == 0 else (second, first)
        out = x.new_empty(own.numel()) if into is None else into
        splits = [0, others.numel()] if self.rank == 0 else [others.numel(), 0]
        handle = self._alltoall_start(others, splits, out, name)
        return Exchange(handle, [own, out] if self.rank == 0 else [out, own], out)

    def _grid_of(self, x: torch.Tensor) -> Grid | None:
        """For `x`, of all parts: NCCL knows the links itself."""
        return None if x.is_cuda else self.grid_for(x.numel() * x.element_size())

    def _use_native(self, x: torch.Tensor, lengths: Sequence[int]) -> bool:
        native = x.is_cuda if self._native is None else self._native
        return native and x.dtype != torch.bfloat16 and len(set(lengths)) == 1

    def _alltoall_start(
        self, x: torch.Tensor, splits: Sequence[int], out: torch.Tensor, name: str
    ) -> Handle:
        return self._start(compat.alltoall_start, name, _wire(x), arrays.splits(splits), _wire(out))

    def sum_here_start(
        self, x: torch.Tensor, lengths: Sequence[int], *, name: str
    ) -> two_steps.SumHere | None:
        """The first step of a reducescatter, where ranks on several hosts make two; else None."""
        grid = self._grid_of(x)
        if grid is None:
            return None
        moved = sum(grid.scatter[0].splits(lengths)) * x.element_size()
        self._note(f"{name}/here", "reducescatter", x, moved=moved)
        return two_steps.sum_here_start(self._alltoall_start, grid, x, lengths, name)

    def swap_start(
        self, x: torch.Tensor, splits: Sequence[int], out: torch.Tensor, *, name: str
    ) -> Handle:
        """The exchange of a reducescatter whose parts are packed: `splits[r]` bytes of `x` go to
        rank r, none to the own one; what comes fills `out`, in rank order."""
        self._note(name, "reducescatter", x, moved=x.numel() * x.element_size())
        return self._alltoall_start(x, splits, out, name)

    def gather_start(self, x: torch.Tensor, lengths: Sequence[int], *, name: str) -> Handle:
        """An allgather in place: `x` lies on every rank, and part r of it comes from rank r."""
        parts = x.split(list(lengths))
        own = parts[self.rank]
        self._note(name, "allgather", x, moved=own.numel() * own.element_size() * (self.size - 1))
        if self.size == 2:
            splits = [0, own.numel()] if self.rank == 0 else [own.numel(), 0]
            return self._alltoall_start(own, splits, parts[1 - self.rank], name)
        grid = self._grid_of(x)
        if grid is not None:
            return two_steps.gather_start(self._alltoall_start, grid, x, lengths, name)
        # Input and output of an allgather must not overlap.
        sent = own.clone()
        return self._start(compat.allgather_start, name, _wire(sent), _wire(x))

    def gather_into(
        self, out: torch.Tensor, own: torch.Tensor, lengths: Sequence[int], *, name: str
    ) -> Handle:
        """An allgather of `own`, this rank's part, into `out`. Of two ranks or one, `own` may lie
        in its place there; else it must lie elsewhere."""
        moved = own.numel() * own.element_size() * (self.size - 1)
        self._note(name, "allgather", out, moved=moved)
        if self.size == 2:
            parts = out.split(list(lengths))
            _put(own, parts[self.rank])
            splits = [0, own.numel()] if self.rank == 0 else [own.numel(), 0]
            return self._alltoall_start(own, splits, parts[1 - self.rank], name)
        grid = self._grid_of(out)
        if grid is not None:
            _put(own, out.split(list(lengths))[self.rank])
            return two_steps.gather_start(self._alltoall_start, grid, out, lengths, name)
        return self._start(compat.allgather_start, name, _wire(own), _wire(out))

    def broadcast_in_place(self, x: torch.Tensor, root: int = 0, *, name: str) -> None:
        """Overwrite the contiguous `x` with that of rank `root`; waits for it."""
        self._note(name, "broadcast", x)
        self._start(mpi_ops.broadcast_async_, name, _wire(x), self._set.ranks[root]).wait()

    def broadcast_pickled(self, value: Any, *, name: str) -> Any:
        """What the first rank gives, which may be more than JSON can say."""
        root = self._set.ranks[0]
        return hvd.broadcast_object(value, root, name=name, process_set=self._set)

    def allreduce_start(self, x: torch.Tensor, op: str = "sum", *, name: str) -> Handle:
        """Combine in place. Not for bfloat16."""
        self._note(name, "allreduce", x)
        return self._start(mpi_ops.allreduce_async_, name, x, op=self._ops[op])

    def _run(self, kind: str, x: Any, name: str, **how: Any) -> Any:
        return self._start(getattr(mpi_ops, f"{kind}_async"), name, x, **how).wait()

    def _start(
        self, start: Callable[..., int], name: str, x: torch.Tensor, *args: Any, **how: Any
    ) -> _HorovodHandle:
        with self.explained(name):
            started = start(x, *args, name=name, process_set=self._set, **how)
        # Not the handle: that keeps tensors alive.
        self.whereabouts.started(name, functools.partial(compat.is_done, started))
        return _HorovodHandle(self, name, started, x)


def _put(part: torch.Tensor, place: torch.Tensor) -> None:
    if part.data_ptr() != place.data_ptr():
        place.copy_(part)


class LocalCollectives(SingleProcess):
    """The same calls for a rank on its own: one process, or outside the process set."""

    def exchange_start(
        self,
        x: torch.Tensor,
        lengths: Sequence[int],
        *,
        name: str,
        into: torch.Tensor | None = None,
    ) -> Exchange:
        return Exchange(Done(), [x], x.new_empty(0))

    def gather_start(self, x: torch.Tensor, lengths: Sequence[int], *, name: str) -> Handle:
        return Done()

    def gather_into(
        self, out: torch.Tensor, own: torch.Tensor, lengths: Sequence[int], *, name: str
    ) -> Handle:
        _put(own, out)
        return Done()

    def allreduce_start(self, x: torch.Tensor, op: str = "sum", *, name: str) -> Handle:
        return Done()

    from_numpy = staticmethod(arrays.from_numpy)
    to_numpy = staticmethod(arrays.to_numpy)


def join(process_set: Any = None) -> TorchCollectives | LocalCollectives:
    """The collectives of this rank in `process_set` (all ranks unless given)."""
    if not hvd.is_initialized():
        raise RuntimeError("Horovod is not initialised: call horovod.torch.init() first")
    check_ranks(os.environ, hvd.size())
    members = hvd.global_process_set if process_set is None else process_set
    check_registered(members)
    if not members.included() or members.size() == 1:
        return LocalCollectives()
    return TorchCollectives(members)
