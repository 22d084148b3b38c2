"""Large blocks of memory that a step on a CPU makes and frees."""

from __future__ import annotations

import resource

import pytest
import torch
from training import STAGES, sharded

from zerohvd.torch import heap

LARGE = 64 << 20


def faults():
    """Pages that a large block costs which was there a moment ago."""
    for _ in range(3):  # where the first one lay there may be a few bytes too few for another
        torch.empty(LARGE, dtype=torch.uint8).fill_(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(LARGE, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("stage", STAGES)
def test_large_blocks_of_a_step_are_there_for_the_next(stage):
    heap.map_large()
    sharded(stage=stage, steps=1)
    assert faults() < LARGE / 4096 / 10
    heap.leave_alone()


@pytest.mark.parametrize(
    ("environ", "ours"),
    [
        ({}, True),
        ({"ZEROHVD_MALLOC": "1", "MALLOCATOR": "x", "GLIBC_TUNABLES": "glibc.rtld=1"}, True),
        ({"ZEROHVD_MALLOC": "0"}, False),
        ({"MALLOC_MMAP_MAX_": "9"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, False),
    ],
)
def test_settings_of_the_user_are_left_alone(environ, ours):
    assert heap.is_ours(environ) is ours
