"""Reducescatter and allgather in two steps, for ranks on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.communication.hosts import Grid, Step
from zerohvd.keras.communication import arrays

Alltoall = Callable[[Any, Sequence[int], str], Any]


def scatter(
    alltoall: Alltoall, grid: Grid, x: Any, lengths: Sequence[int], own: int, name: str
) -> Any:
    """The sum over the ranks of part `own` of `x`; 16-bit floats are added in float32."""
    across = grid.scatter[1]
    mine = sum_here(alltoall, grid, x, lengths, name)
    sums = tf.split(mine, [lengths[p] for p in grid.column])
    # Rounded to what travels, and the own part too: all hosts count alike.
    narrow = {p: tf.cast(part, x.dtype) for p, part in zip(grid.column, sums, strict=True)}
    total = arrays.widen(narrow[own])
    for came in _exchange(alltoall, across, narrow, lengths, f"{name}/across"):
        total += arrays.widen(came[own])
    return total


def sum_here(
    alltoall: Alltoall, grid: Grid, x: Any, lengths: Sequence[int], name: str
) -> Any:
    """The sum over this host of the parts that ranks in the same place of all hosts need."""
    parts = dict(enumerate(tf.split(x, list(lengths))))
    mine = arrays.widen(tf.concat([parts[p] for p in grid.column], 0))
    for came in _exchange(alltoall, grid.scatter[0], parts, lengths, f"{name}/here"):
        mine += arrays.widen(tf.concat(list(came.values()), 0))
    return mine


def gather(
    alltoall: Alltoall, grid: Grid, x: Any, lengths: Sequence[int], own: int, name: str
) -> Any:
    """The parts of all ranks, in rank order; `x` is that of rank `own`."""
    parts = {own: x}
    for step, where in zip(grid.gather, ("across", "here"), strict=True):
        for came in _exchange(alltoall, step, parts, lengths, f"{name}/{where}"):
            parts.update(came)
    return tf.concat([parts[rank] for rank in range(len(lengths))], 0)


def _exchange(
    alltoall: Alltoall, step: Step, parts: Mapping[int, Any], lengths: Sequence[int], name: str
) -> list[dict[int, Any]]:
    """What came from each rank, by part."""
    sent = tf.concat([parts[p] for p in step.sent()], 0)
    received = alltoall(sent, step.splits(lengths), name)
    come = step.received()
    received.set_shape([sum(lengths[p] for p in come)])
    pieces = iter(tf.split(received, [lengths[p] for p in come]))
    return [{p: next(pieces) for p in expected} for expected in step.receives.values()]
