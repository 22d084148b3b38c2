"""From one Layout to another: every element arrives, once, wherever it was."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import PADDING, cut, gpt2, layouts, numbered, pack, spec_lists

from zerohvd.layout import ParamSpec, build_layout
from zerohvd.relayout import Copy, copies

SPECS = [ParamSpec("w", (5, 7)), ParamSpec("b", (7,)), ParamSpec("s", ())]


def empty_shards(layout):
    return [
        [np.full(b.span(rank).length, PADDING) for b in layout.buckets]
        for rank in range(layout.size)
    ]


def execute(plan, old_shards, new_shards):
    for c in plan:
        source = old_shards[c.src_rank][c.src_bucket][c.src_start : c.src_start + c.length]
        target = new_shards[c.dst_rank][c.dst_bucket][c.dst_start : c.dst_start + c.length]
        assert source.size == target.size == c.length > 0
        assert (target == PADDING).all(), "copied twice"
        target[:] = source


def same(a, b):
    pairs = zip(itertools.chain(*a), itertools.chain(*b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@st.composite
def pairs(draw):
    """Two layouts of one model: in another order, of other dtypes, over other ranks."""
    specs = draw(spec_lists(max_params=8))
    others = [
        dataclasses.replace(p, dtype=draw(st.sampled_from(["float32", "bfloat16"])), group=0)
        for p in draw(st.permutations(specs))
    ]
    return draw(layouts(specs)), draw(layouts(others))


@given(pairs())
def test_every_element_arrives_exactly_once_and_padding_never_travels(pair):
    old, new = pair
    values = numbered(old)
    arrived = empty_shards(new)
    execute(copies(old, new), cut(old, pack(old, values)), arrived)
    assert same(arrived, cut(new, pack(new, values)))


@given(pairs())
def test_what_single_ranks_ask_for_is_what_all_ranks_receive(pair):
    old, new = pair
    plan = list(copies(old, new))
    for rank in range(new.size):
        assert list(copies(old, new, dst_rank=rank)) == [c for c in plan if c.dst_rank == rank]


@given(pairs())
def test_there_and_back_again(pair):
    old, new = pair
    start = cut(old, pack(old, numbered(old)))
    there, back = empty_shards(new), empty_shards(old)
    execute(copies(old, new), start, there)
    execute(copies(new, old), there, back)
    assert same(back, start)


@given(layouts())
def test_the_same_layout_copies_every_piece_to_where_it_is(layout):
    for c in copies(layout, layout):
        assert (c.src_rank, c.src_bucket, c.src_start) == (c.dst_rank, c.dst_bucket, c.dst_start)


@pytest.mark.parametrize("hops", [(1, 128, 3), (128, 1, 128), (127, 128, 64, 65, 2)])
def test_a_model_survives_many_changes_of_the_number_of_ranks(hops):
    specs = [ParamSpec(f"layer.{i}", (i, 37)) for i in range(30)]
    chain = [
        build_layout(specs, size, bucket_bytes=4096 >> i, partition=["flat", "parameter"][i % 2])
        for i, size in enumerate(hops)
    ]
    values = numbered(chain[0])
    held = cut(chain[0], pack(chain[0], values))
    for old, new in itertools.pairwise(chain):
        moved = empty_shards(new)
        execute(copies(old, new), held, moved)
        held = moved
    assert same(held, cut(chain[-1], pack(chain[-1], values)))


def test_copies_speak_in_parameter_names_and_offsets_inside_shards():
    old = build_layout([ParamSpec("w", (32,))], 2)
    new = build_layout([ParamSpec("w", (32,))], 1)
    assert list(copies(old, new)) == [
        Copy("w", 0, 0, 0, 0, 0, 0, 16),
        Copy("w", 1, 0, 0, 0, 0, 16, 16),
    ]


def test_one_rank_of_many_plans_only_its_own_share():
    old, new = build_layout(gpt2(), 1024), build_layout(gpt2(), 768, bucket_bytes=1 << 20)
    start = time.process_time()
    plan = list(copies(old, new, dst_rank=700))
    assert time.process_time() - start < 0.5
    assert {c.dst_rank for c in plan} == {700}
    held = sum(p.param_span.length for p in new.pieces(700))
    assert sum(c.length for c in plan) == held
    assert len(plan) < 10_000


def test_a_trillion_parameters_move_to_another_number_of_ranks():
    specs = [ParamSpec(f"layer.{i}", (10_000, 10_000)) for i in range(10_000)]
    old, new = build_layout(specs, 1024), build_layout(specs, 512)
    start = time.process_time()
    moved = sum(c.length for c in copies(old, new, dst_rank=17))
    assert time.process_time() - start < 5
    assert moved == sum(p.param_span.length for p in new.pieces(17))


def test_many_small_parameters_cost_no_more_than_their_number():
    specs = [ParamSpec(f"p{i}", (3,)) for i in range(20_000)]
    old = build_layout(specs, 128, partition="parameter")
    new = build_layout(specs, 96, partition="parameter")
    start = time.process_time()
    assert sum(1 for _ in copies(old, new)) == len(specs)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([*SPECS, ParamSpec("x", (1,))], "parameter 'x' is in the new layout, but not in the old"),
        (SPECS[1:], "parameter 'w' is in the old layout, but not in the new"),
        (
            [ParamSpec("w", (7, 5)), *SPECS[1:]],
            r"parameter 'w' has shape \(5, 7\) in the old layout, but \(7, 5\) in the new",
        ),
    ],
)
def test_models_that_do_not_match_are_refused_before_anything_is_copied(specs, message):
    with pytest.raises(ValueError, match=message):
        copies(build_layout(SPECS, 2), build_layout(specs, 3))


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_the_new_world_is_refused(rank):
    with pytest.raises(ValueError, match=r"dst_rank must be in \[0, 3\)"):
        copies(build_layout(SPECS, 2), build_layout(SPECS, 3), dst_rank=rank)
