"""Where every parameter lives, for any model, bucket size and number of ranks."""

from __future__ import annotations

import dataclasses
import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import (
    PADDING,
    bucket_sizes,
    cut,
    gpt2,
    layouts,
    numbered,
    pack,
    partitions,
    sizes,
    spec_lists,
    unpack,
)

from zerohvd.layout import (
    ALIGN,
    ALIGN_UP_TO_SIZE,
    DTYPE_BYTES,
    MAX_BUCKET_ELEMENTS,
    MAX_CHUNKS,
    ParamSpec,
    Span,
    build_layout,
)


@given(layouts())
def test_every_element_is_owned_exactly_once(layout):
    owned = {i: np.zeros(p.numel, int) for i, p in enumerate(layout.params)}
    for rank in range(layout.size):
        for piece in layout.pieces(rank):
            owned[piece.param][slice(*piece.param_span)] += 1
    assert all((times == 1).all() for times in owned.values())


@given(layouts())
def test_shards_follow_each_other_and_cover_their_bucket(layout):
    for bucket in layout.buckets:
        spans = bucket.spans()
        assert spans[0].start == 0
        assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
        assert spans[-1].stop == bucket.padded
    held = sum(layout.shard_numel(rank) for rank in range(layout.size))
    assert held == layout.numel + layout.padding


@given(layouts())
def test_packing_into_shards_and_back_changes_nothing(layout):
    values = numbered(layout)
    shards = cut(layout, pack(layout, values))
    gathered = [
        np.concatenate([shards[rank][b.index] for rank in range(layout.size)])
        for b in layout.buckets
    ]
    again = unpack(layout, gathered)
    assert all(np.array_equal(again[name], value) for name, value in values.items())


@given(layouts())
def test_pieces_say_where_in_the_bucket_they_lie_and_never_hold_padding(layout):
    values, flats = numbered(layout), pack(layout, numbered(layout))
    for rank in range(layout.size):
        for piece in layout.pieces(rank):
            held = flats[piece.bucket][slice(*piece.bucket_span)]
            value = values[layout.params[piece.param].name]
            assert np.array_equal(held, value[slice(*piece.param_span)])
            assert PADDING not in held


@given(layouts())
def test_flat_buckets_are_padded_to_a_multiple_of_the_ranks_and_whole_ones_not_at_all(layout):
    for bucket, flat in zip(layout.buckets, pack(layout, numbered(layout)), strict=True):
        assert bucket.padding == np.count_nonzero(flat == PADDING)
        if layout.partition == "flat":
            assert bucket.padded % layout.size == 0
        else:
            assert bucket.padding == 0


@given(layouts())
def test_slots_follow_each_other_without_overlap(layout):
    for bucket in layout.buckets:
        assert bucket.slots and all(s.length > 0 for s in bucket.slots)
        for a, b in itertools.pairwise(bucket.slots):
            assert a.span.stop <= b.start
        assert bucket.slots[-1].span.stop <= bucket.padded


@given(layouts())
def test_parameters_and_shards_of_flat_buckets_start_aligned_where_that_is_cheap(layout):
    if layout.partition != "flat" or layout.size > ALIGN_UP_TO_SIZE:
        return
    for bucket in layout.buckets:
        assert all(slot.start % ALIGN == 0 for slot in bucket.slots)
        assert all(span.start % ALIGN == 0 for span in bucket.spans())


@given(layouts())
def test_every_bucket_has_one_dtype_and_one_group(layout):
    for bucket in layout.buckets:
        members = [layout.params[s.param] for s in bucket.slots]
        assert {p.dtype for p in members} == {bucket.dtype}
        assert len({p.group for p in members}) == 1


@given(layouts())
def test_chunks_of_a_parameter_lie_in_consecutive_buckets_and_only_the_last_is_padded(layout):
    for found in layout.slots_of:
        indices = [index for index, _ in found]
        assert all(b == a + 1 for a, b in itertools.pairwise(indices))
        assert len(found) <= MAX_CHUNKS
        if len(found) > 1:
            assert all(len(layout.buckets[i].slots) == 1 for i in indices)
            assert all(layout.buckets[i].padding == 0 for i in indices[:-1])


@given(layouts())
def test_a_bucket_beyond_bucket_bytes_holds_one_parameter_or_chunk_that_is_cut_no_finer(layout):
    row = layout.size * ALIGN  # chunks are rounded up to at most this many elements
    for bucket in layout.buckets:
        filled = bucket.slots[-1].span.stop
        if filled * DTYPE_BYTES[bucket.dtype] <= layout.bucket_bytes:
            continue
        assert len(bucket.slots) == 1
        spec = layout.params[bucket.slots[0].param]
        if layout.partition == "parameter":
            assert filled == spec.numel
        else:
            count = min(MAX_CHUNKS, -(-spec.nbytes // layout.chunk_bytes))
            assert filled < -(-spec.numel // count) + row


def test_a_parameter_larger_than_a_bucket_is_cut_but_never_into_more_than_four():
    for numel, expected in ((16, 1), (17, 2), (33, 3), (64, 4), (6400, 4)):
        layout = build_layout([ParamSpec("w", (1000 * numel,))], 1, bucket_bytes=64_000)
        assert len(layout.buckets) == expected
    whole = build_layout([ParamSpec("w", (6400,))], 1, bucket_bytes=64, chunk_bytes=1 << 20)
    assert len(whole.buckets) == 1


@given(layouts())
def test_buckets_go_out_in_the_order_in_which_backward_completes_them(layout):
    completed_by = [min(s.param for s in b.slots) for b in layout.buckets]
    assert completed_by == sorted(completed_by, reverse=True)


@given(spec_lists(), sizes, bucket_sizes, partitions)
def test_the_same_inputs_give_the_same_layout(specs, size, bucket_bytes, partition):
    one, two = (
        build_layout(iter(specs), size, bucket_bytes=bucket_bytes, partition=partition)
        for _ in range(2)
    )
    assert one == two
    assert one.fingerprint() == two.fingerprint()


SPECS = (ParamSpec("w", (3, 4)), ParamSpec("b", (4,)), ParamSpec("c", (4,), "float16"))


def _with(index: int, **changes: object) -> tuple[ParamSpec, ...]:
    changed = list(SPECS)
    changed[index] = dataclasses.replace(changed[index], **changes)
    return tuple(changed)


@pytest.mark.parametrize(
    ("specs", "settings"),
    [
        (_with(0, name="v"), {}),
        (_with(0, shape=(4, 3)), {}),
        (_with(1, dtype="float64"), {}),
        (_with(1, group=1), {}),
        (_with(1, group="0"), {}),
        (SPECS[::-1], {}),
        (SPECS[:2], {}),
        ((*SPECS, ParamSpec("empty", (0,))), {}),
        (SPECS, {"size": 3}),
        (SPECS, {"bucket_bytes": 64}),
        (SPECS, {"chunk_bytes": 64}),
        (SPECS, {"partition": "parameter"}),
    ],
    ids=[
        "name",
        "shape",
        "dtype",
        "group",
        "group type",
        "order",
        "fewer",
        "more",
        "size",
        "bucket_bytes",
        "chunk_bytes",
        "partition",
    ],
)
def test_fingerprint_differs_when_anything_does(specs, settings):
    other = build_layout(specs, **{"size": 2, **settings})
    assert other.fingerprint() != build_layout(SPECS, 2).fingerprint()


@pytest.mark.parametrize("size", [*range(2, 17), 31, 64, 65, 100, 256, 777, 1000, 1024])
def test_padding_of_gpt2_is_below_a_thousandth(size):
    layout = build_layout(gpt2(), size)
    assert layout.numel == 124_439_808
    assert layout.padding < 0.001 * layout.numel


def test_a_trillion_parameters_in_ten_thousand_tensors_are_laid_out_in_a_second():
    specs = [ParamSpec(f"layer.{i}.weight", (10_000, 10_000)) for i in range(10_000)]
    start = time.process_time()
    layout = build_layout(specs, 1024)
    assert time.process_time() - start < 1.0
    assert layout.numel == 10**12
    assert len(layout.buckets) <= MAX_CHUNKS * len(specs)

    tracemalloc.start()
    build_layout(specs, 1024)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200e6


HUGE = [ParamSpec("huge", (5 * 2**31 + 3,)), ParamSpec("other", (2**31 - 2,))]
MANY = [ParamSpec(f"w{i}", (2**28,), "int8") for i in range(20)]


@pytest.mark.parametrize(("specs", "partition"), [(HUGE + MANY, "flat"), (MANY, "parameter")])
def test_no_collective_needs_more_elements_than_mpi_can_count(specs, partition):
    layout = build_layout(specs, 1000, bucket_bytes=2**40, partition=partition)
    assert all(b.padded <= MAX_BUCKET_ELEMENTS for b in layout.buckets)
    assert sum(b.numel for b in layout.buckets) == layout.numel


def test_a_parameter_that_no_collective_can_move_whole_is_not_promised_to_stay_so():
    with pytest.raises(
        ValueError, match=r"'huge' has .* cannot be kept whole: use partition='flat"
    ):
        build_layout(HUGE[:1], 2, partition="parameter")


@given(spec_lists(max_params=40), sizes)
def test_whole_parameters_are_spread_evenly(specs, size):
    layout = build_layout(specs, size, partition="parameter")
    loads = [layout.shard_numel(rank) for rank in range(size)]
    assert max(loads) <= layout.numel / size + max((p.numel for p in specs), default=0)


def test_large_parameters_are_given_away_first_and_small_ones_fill_up():
    specs = [ParamSpec(f"small.{i}", (1,)) for i in range(4)] + [ParamSpec("large", (4,))]
    layout = build_layout(specs, 2, partition="parameter")
    assert [layout.shard_numel(rank) for rank in range(2)] == [4, 4]


@given(layouts())
def test_the_parameter_partition_gives_every_parameter_one_owner(layout):
    for found in layout.slots_of:
        owners = {slot.owner for _, slot in found}
        if layout.partition == "flat":
            assert owners <= {-1}
        else:
            assert len(found) <= 1
            assert owners <= set(range(layout.size))


@pytest.mark.parametrize("partition", ["flat", "parameter"])
@pytest.mark.parametrize("size", [1, 2, 7, 128])
def test_empty_parameters_scalars_and_more_ranks_than_elements(size, partition):
    specs = [ParamSpec("empty", (0, 5)), ParamSpec("scalar", ()), ParamSpec("tiny", (3,))]
    layout = build_layout(specs, size, partition=partition)
    assert layout.numel == 4
    assert layout.slots_of[0] == ()
    held = [p.param for rank in range(size) for p in layout.pieces(rank)]
    assert sorted(set(held)) == [1, 2]


@pytest.mark.parametrize("specs", [[], [ParamSpec("empty", (0,))]])
def test_a_model_without_elements_has_no_buckets(specs):
    layout = build_layout(specs, 4)
    assert layout.buckets == ()
    assert [layout.shard_numel(rank) for rank in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_has_no_shard(rank):
    bucket = build_layout(SPECS, 2).buckets[0]
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\)"):
        bucket.span(rank)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be a positive number of ranks, got 0"),
        ({"size": 2.0}, "size must be a positive number of ranks, got 2.0"),
        ({"partition": "auto"}, "partition must be 'flat' or 'parameter', got 'auto'"),
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
        ({"chunk_bytes": 0}, "chunk_bytes must be at least 1, got 0"),
        ({"params": [SPECS[0], SPECS[0]]}, "parameter name 'w' occurs twice"),
    ],
)
def test_impossible_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_layout(**{"params": SPECS, "size": 2, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("", (1,)), TypeError, "non-empty name"),
        ((None, (1,)), TypeError, "non-empty name"),
        (("w", (2, -1)), ValueError, "'w' has a negative dimension"),
        (("w", (2,), "float128"), ValueError, "'w' has dtype 'float128'; supported are float64"),
    ],
)
def test_impossible_parameters_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ParamSpec(*arguments)


def test_shapes_may_be_any_sequence_of_integers():
    assert ParamSpec("w", [np.int64(2), 3]).shape == (2, 3)
    assert ParamSpec("w", [2, 3]) == ParamSpec("w", (2, 3))


@given(*[st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted) for _ in range(2)])
def test_spans_intersect_like_sets_of_integers(a, b):
    common = Span(*a).intersect(Span(*b))
    assert set(range(*common)) == set(range(*a)) & set(range(*b))
    assert common.length == len(range(*common))


@given(layouts())
def test_gaps_chains_and_lengths_agree_with_the_slots(layout):
    for bucket in layout.buckets:
        covered = [i for slot in bucket.slots for i in range(*slot.span)]
        covered += [i for gap in bucket.gaps() for i in range(*gap)]
        assert sorted(covered) == list(range(bucket.padded))
        assert bucket.lengths == [span.length for span in bucket.spans()]
        chain = layout.chain_of(bucket.index)
        shared = {b for s in bucket.slots for b, _ in layout.slots_of[s.param]}
        assert set(chain) == shared
        assert chain == list(range(chain[0], chain[-1] + 1))


@given(layouts(), st.integers(1, 40))
def test_a_piece_is_cut_into_parts_and_joined_again(layout, length):
    for piece in itertools.chain.from_iterable(layout.pieces(r) for r in range(layout.size)):
        parts = list(piece.parts(length))
        assert [i for p in parts for i in range(*p.param_span)] == list(range(*piece.param_span))
        assert all(p.param_span.length == p.bucket_span.length <= length for p in parts)
        assert parts[0].joined(parts[-1]) == piece


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [1, 7, 256])
def test_a_table_is_cut_at_its_rows(size, width):
    table = ParamSpec("table", (1001, width), group="table", multiple=width)
    layout = build_layout([ParamSpec("w", (5,)), table], size, chunk_bytes=1 << 40)
    (bucket,) = [b for b in layout.buckets if layout.params[b.slots[0].param] is table]
    cuts = [c for r in range(size) for c in bucket.span(r).intersect(bucket.slots[0].span)]
    assert all(c % width == 0 or c >= table.numel for c in cuts)
    assert bucket.padding < size * 16 * width
    plain = build_layout([ParamSpec("w", (5,)), ParamSpec("table", (1001, width), group="table")],
                         size, chunk_bytes=1 << 40)
    assert width == 1 or plain.fingerprint() != layout.fingerprint()
