"""The update, in waves: while one part of the shards is updated, the gradients of the next part are
still coming in and the parameters of the part before are going out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerohvd.torch.collectives import Handle
from zerohvd.torch.partition import is_elementwise
from zerohvd.torch.sharding import ShardedParams

# Of every section: the first part is updated while the gradients of the rest come in, and goes out
# while the rest is updated.
WAVES = 2


class Part(NamedTuple):
    """Buckets of one section."""

    section: ShardedParams
    buckets: range


def plan(sections: Sequence[ShardedParams], inner: torch.optim.Optimizer) -> list[list[Part]]:
    """The waves of a step: lists of parts that are updated by one call of the inner optimizer."""
    if not can_be_split(inner):
        return [[Part(s, s.buckets) for s in sections]]
    return [[part] for section in sections for part in _cut(section)]


def can_be_split(inner: torch.optim.Optimizer) -> bool:
    """Whether several calls of `step()`, each with some of the gradients, do the same as one.

    An optimizer of the user's may count its calls, and so may hooks.
    """
    hooks = (inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks)
    # A learning-rate scheduler made for the inner optimizer only notes that step() was called.
    step = vars(inner).get("step")
    replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    return is_elementwise(inner) and not any(hooks) and not replaced


def _cut(section: ShardedParams) -> list[Part]:
    """Runs of buckets of about equal bytes."""
    sizes = [bucket.nbytes for bucket in section.layout.buckets]
    goal = max(1, -(-sum(sizes) // WAVES))
    parts, first, filled = [], 0, 0
    for b, size in enumerate(sizes):
        filled += size
        if filled >= goal or b == len(sizes) - 1:
            parts.append(Part(section, range(first, b + 1)))
            first, filled = b + 1, 0
    return parts


def run(
    waves: Sequence[Sequence[Part]], inner: torch.optim.Optimizer, *, synchronized: bool
) -> None:
    """Update the shards, and return when every rank's parameters are current.

    Args:
        synchronized: The pieces hold their gradients; otherwise these are still coming in.
    """
    held = [[part.section.take_piece_grads(part.buckets) for part in wave] for wave in waves]
    under_way: list[Handle] = []
    for wave, grads in zip(waves, held, strict=True):
        for part, kept in zip(wave, grads, strict=True):
            if synchronized:
                part.section.give_piece_grads(part.buckets, kept)
            elif part.buckets:
                part.section.reducer.finish(part.buckets[-1])
                part.section.set_piece_grads(part.buckets)
        inner.step()
        for part in wave:
            part.section.take_piece_grads(part.buckets)  # the next call must not see them again
            under_way += part.section.gather_start(part.buckets)
    for handle in under_way:
        handle.wait()
