"""Reducescatter and allgather in two steps, for ranks on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zerohvd.communication.collectives import Handle
from zerohvd.communication.hosts import Grid, Step

StartAlltoall = Callable[[torch.Tensor, Sequence[int], torch.Tensor, str], Handle]


class TwoSteps:
    """A handle. The second step begins when somebody looks after the first or waits for it."""

    def __init__(self, first: Handle, go_on: Callable[[], Handle], end: Callable[[], None]) -> None:
        """
        Args:
            go_on: Starts the second step with what the first one gave.
            end: Puts what the second one gave in its place.
        """
        self._now = first
        self._error: Exception | None = None
        self._next: list[Callable[[], Any]] = [go_on, end]

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        while self._next and self._error is None and self._now.done():
            try:
                self._advance()
            except Exception as error:  # it belongs to whoever waits
                self._error = error
        return self._error is not None or not self._next

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        while self._next:
            self._advance()

    def _advance(self) -> None:
        self._now.wait()
        begun = self._next.pop(0)()
        if begun is not None:
            self._now = begun


class SumHere(NamedTuple):
    """The first step of a reducescatter, under way."""

    column: Sequence[int]  # the ranks whose parts are added up here, ascending
    handle: Handle
    total: Callable[[], torch.Tensor]  # these parts, 1-D; to be called once, after the handle


def sum_here_start(
    alltoall: StartAlltoall, grid: Grid, x: torch.Tensor, lengths: Sequence[int], name: str
) -> SumHere:
    """Add up inside this host what ranks in the same place of all hosts need, in float32 or
    better."""
    parts, here = x.split(list(lengths)), grid.scatter[0]
    memory = [x.new_empty(_total(here.received(), lengths))]
    handle = alltoall(_packed(parts, here), here.splits(lengths), memory[0], f"{name}/here")

    def total() -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        found = torch.cat([parts[p] for p in grid.column]).to(wide)
        received = memory.pop()
        for piece in received.split(found.numel()) if found.numel() else ():
            found += piece
        return found

    return SumHere(grid.column, handle, total)


def scatter_start(
    alltoall: StartAlltoall,
    grid: Grid,
    x: torch.Tensor,
    lengths: Sequence[int],
    own: int,
    name: str,
    into: torch.Tensor | None,
) -> tuple[Handle, list[torch.Tensor], torch.Tensor]:
    """Begin a reducescatter: return the handle, what is left to add up, and received memory.

    Args:
        own: This rank.
        into: Memory that may receive what comes from one other host.
    """
    across = grid.scatter[1]
    here = sum_here_start(alltoall, grid, x, lengths, name)
    sums = x.new_empty(_total(grid.column, lengths))  # over this host, of the column's parts
    by_owner = dict(zip(grid.column, sums.split([lengths[p] for p in grid.column]), strict=True))
    length = _total(across.received(), lengths)
    scratch = x.new_empty(length) if into is None or into.numel() != length else into

    def go_on() -> Handle:
        sums.copy_(here.total())  # rounded once to what travels
        sent = torch.cat([by_owner[p] for p in across.sent()])
        return alltoall(sent, across.splits(lengths), scratch, f"{name}/across")

    come = scratch.split(lengths[own]) if lengths[own] else [scratch] * len(across.receives)
    found = {own: by_owner[own], **dict(zip(across.receives, come, strict=True))}
    handle = TwoSteps(here.handle, go_on, lambda: None)
    return handle, [found[rank] for rank in sorted(found)], scratch


def gather_start(
    alltoall: StartAlltoall, grid: Grid, x: torch.Tensor, lengths: Sequence[int], name: str
) -> Handle:
    """Begin an allgather in place: this rank's part of `x` is there, the others come."""
    parts = x.split(list(lengths))
    across, here = grid.gather
    memory: list[torch.Tensor] = []  # of the step under way

    def start(step: Step, where: str) -> Handle:
        memory.append(x.new_empty(_total(step.received(), lengths)))
        return alltoall(_packed(parts, step), step.splits(lengths), memory[0], f"{name}/{where}")

    def put(step: Step) -> None:
        come = step.received()
        values = memory.pop().split([lengths[p] for p in come])
        for part, value in zip(come, values, strict=True):
            parts[part].copy_(value)

    def go_on() -> Handle:
        put(across)
        return start(here, "here")

    return TwoSteps(start(across, "across"), go_on, lambda: put(here))


def _packed(parts: Sequence[torch.Tensor], step: Step) -> torch.Tensor:
    sent = [parts[p] for p in step.sent()]
    return sent[0] if len(sent) == 1 else torch.cat(sent)


def _total(parts: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[part] for part in parts)
