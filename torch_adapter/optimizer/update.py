"""The update, in waves: while one part of the shards is updated, the gradients of the next part are
still coming in and the parameters of the part before are going out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zerohvd.communication.collectives import Handle
from zerohvd.schedule import cut_waves
from zerohvd.torch import compat
from zerohvd.torch.gradients.section import Section
from zerohvd.torch.optimizer.offload import Offload
from zerohvd.torch.optimizer.partition import is_elementwise

# The first part is updated while the gradients of the rest come in, and goes out while the rest is
# updated.
WAVES = 2


class BucketRange(NamedTuple):
    """Buckets of one section."""

    section: Section
    buckets: range


def plan_waves(
    sections: Sequence[Section], offload: Offload | None, *, split: bool
) -> list[list[BucketRange]]:
    """The waves of a step: lists of parts that are updated by one call of the inner optimizer.

    Args:
        split: The inner optimizer `can_be_split`.
    """
    if offload is not None and offload.on_disk:
        # The state of one section is in memory at a time.
        return [[BucketRange(s, s.buckets)] for s in sections]
    if not split:
        return [[BucketRange(s, s.buckets) for s in sections]]
    waves = cut_waves([s.layout for s in sections], WAVES)
    return [[BucketRange(sections[i], buckets) for i, buckets in wave] for wave in waves]


def can_be_split(inner: torch.optim.Optimizer) -> bool:
    """Whether several calls of `step()`, each with some of the gradients, do the same as one.

    An optimizer of the user's may count its calls, and so may hooks.
    """
    return is_elementwise(inner) and not compat.counts_calls(inner)


def run(
    waves: Sequence[Sequence[BucketRange]],
    inner: torch.optim.Optimizer,
    offload: Offload | None,
    options: Mapping[str, Any],
    *,
    synchronized: bool,
) -> None:
    """Update the shards, and return when every rank's parameters are current.

    Args:
        options: Keywords for the inner optimizer's `step()`.
        synchronized: The pieces hold their gradients; otherwise these are still coming in.
    """
    held = [[part.section.take_piece_grads(part.buckets) for part in wave] for wave in waves]
    under_way: list[Handle] = []
    for wave, grads in zip(waves, held, strict=True):
        for part, kept in zip(wave, grads, strict=True):
            part.section.refresh_masters(part.buckets)
            if synchronized:
                part.section.give_piece_grads(part.buckets, kept)
            elif part.buckets:
                part.section.reducer.finish(part.buckets[-1])
                part.section.set_piece_grads(part.buckets)
        inner.step(**options)
        for part in wave:
            part.section.take_piece_grads(part.buckets)  # the next call must not see them again
            under_way += part.section.gather_start(part.buckets)
            if offload is not None:
                offload.absorb(inner, part.section)
    for handle in under_way:
        handle.wait()
