"""Where ranks are on several hosts, what they exchange crosses links once per host."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerohvd.communication.hosts import Grid, Step, find_grid

placements = st.tuples(st.integers(2, 4), st.integers(2, 4)).flatmap(
    lambda shape: st.permutations([f"h{h}" for h in range(shape[0]) for _ in range(shape[1])])
)


def exchange(steps: list[Step], values: list[dict[int, np.ndarray]]) -> list[list]:
    """What each rank gets: (sender, part, value), in the order of the step."""
    return [
        [
            (sender, part, values[sender][part])
            for sender, parts in step.receives.items()
            for part in parts
        ]
        for step in steps
    ]


def grids(hosts: list[str]) -> list[Grid]:
    found = [find_grid(hosts, rank) for rank in range(len(hosts))]
    assert all(grid is not None for grid in found)
    return found


@given(placements)
def test_what_a_rank_expects_is_what_the_others_send(hosts):
    found = grids(hosts)
    for steps in zip(*(grid.scatter + grid.gather for grid in found), strict=True):
        for a, b in itertools.product(range(len(hosts)), repeat=2):
            assert list(steps[a].sends.get(b, [])) == list(steps[b].receives.get(a, []))
        assert all(list(s.receives) == sorted(s.receives) for s in steps)


@given(placements)
def test_a_reducescatter_gives_each_rank_the_sum_of_its_part(hosts):
    found, size = grids(hosts), len(hosts)
    full = np.random.default_rng(0).integers(0, 100, (size, size))  # [rank, part]
    values = [dict(enumerate(row)) for row in full]
    for step in (0, 1):
        sums = []
        for rank, got in enumerate(exchange([g.scatter[step] for g in found], values)):
            mine = dict(values[rank])
            for _, part, value in got:
                mine[part] = mine[part] + value
            sums.append(mine)
        values = sums
    assert [values[rank][rank] for rank in range(size)] == full.sum(0).tolist()


@given(placements)
def test_an_allgather_gives_each_rank_all_parts(hosts):
    found, size = grids(hosts), len(hosts)
    values = [{rank: rank} for rank in range(size)]
    for step in (0, 1):
        got = exchange([g.gather[step] for g in found], values)
        for mine, new in zip(values, got, strict=True):
            mine.update((part, value) for _, part, value in new)
    assert values == [{rank: rank for rank in range(size)}] * size


@given(placements)
def test_links_are_crossed_once_per_host(hosts):
    """Of N parts, what leaves a host is what the other hosts own, or what this one owns for each
    of the others: not once for each of its ranks."""
    found, size = grids(hosts), len(hosts)
    others = size - hosts.count(hosts[0])
    for steps in zip(*(grid.scatter + grid.gather for grid in found), strict=True):
        for host in set(hosts):
            crossing = [
                part
                for rank in range(size)
                if hosts[rank] == host
                for to, parts in steps[rank].sends.items()
                if hosts[to] != host
                for part in parts
            ]
            assert len(crossing) in (0, others)


@pytest.mark.parametrize("hosts", ["aaaa", "abcd", "a", "ab"])
def test_one_host_or_one_rank_on_each_needs_no_table(hosts):
    assert find_grid(list(hosts), 0) is None


def test_hosts_with_different_numbers_of_ranks_are_told(caplog):
    assert find_grid(["a", "a", "b"], 0) is None
    assert "equally many ranks on each host" in caplog.text
