"""The collectives of a step, and how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerohvd.communication.log import moved_bytes
from zerohvd.planning.network import Network
from zerohvd.planning.workload import ROOT, ROWS, Section, Workload


class Collective(NamedTuple):
    """One collective of a step."""

    op: str
    nbytes: int  # of the whole buffer


class StepTime(NamedTuple):
    """Seconds of a step: everything in turn, and everything that can be at the same time."""

    least: float  # full overlap
    most: float  # no overlap


def collectives(workload: Workload, stage: int, size: int) -> list[Collective]:
    """What one step of one micro-batch sends, without agreements of a few bytes."""
    if size == 1:
        return []
    return list(_collectives(workload.sections(stage, size), stage, workload.kept_units))


def _collectives(sections: Sequence[Section], stage: int, kept: int) -> Iterator[Collective]:
    numbers = sorted({u for s in sections for u in s.units if u is not None} - {ROOT})
    # The backward pass begins with the last units, so these stay, as the root does all along.
    once = {ROOT, *numbers[max(0, len(numbers) - kept) :]}
    for section in sections:
        for bucket, unit in zip(section.layout.buckets, section.units, strict=True):
            if unit == ROWS:
                continue  # how many rows there are is known in a step only
            if stage == 0:
                if section.trained:
                    yield Collective("allreduce", bucket.nbytes)
                continue
            if section.trained:
                yield Collective("reducescatter", bucket.nbytes)
                if unit is None:
                    yield Collective("allgather", bucket.nbytes)
            if unit is not None:
                for _ in range(1 if unit in once else 2):
                    yield Collective("allgather", bucket.nbytes)


def moved(found: Sequence[Collective], size: int) -> int:
    """Bytes that a rank sends, as communication_report counts them."""
    return sum(moved_bytes(c.op, c.nbytes, size) for c in found)


def step_time(
    found: Sequence[Collective], size: int, network: Network, compute: float = 0.0
) -> StepTime:
    """The bracket of a step.

    Without overlap, computation and every collective run in turn, and each collective waits for a
    cycle of Horovod's thread. With full overlap the longer of both counts, and one cycle.

    Args:
        compute: Seconds of forward, backward pass and update.
    """
    busy = sum(network.seconds(c.op, c.nbytes, size) for c in found)
    if not found:
        return StepTime(compute, compute)
    return StepTime(
        max(compute, busy) + network.cycle, compute + busy + len(found) * network.cycle
    )
