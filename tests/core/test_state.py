"""Whole states from shards: every element in its place, on one rank or on all, at any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerohvd.errors import ShardedStateError
from zerohvd.layout import ParamSpec, build_layout
from zerohvd.testing import ThreadWorld
from zerohvd.training.state import (
    ELEMENT,
    SCALAR,
    TENSOR,
    VALUE,
    PieceValue,
    check_complete,
    check_destination,
    collect_state,
    part_of,
)

SHAPES = [(7, 3), (), (0, 4), (130,), (5,), (2, 2, 2), (1,), (300,)]


class Arrays:
    """Numpy's, noting the largest shard."""

    def __init__(self):
        self.largest = 0

    def zeros(self, length, dtype, bucket):
        self.largest = max(self.largest, length)
        return np.zeros(length, dtype)

    def flatten(self, x):
        return x.reshape(-1)

    def to_wire(self, x):
        return np.ascontiguousarray(x)

    def to_host(self, x):
        return x

    def empty(self, shape, dtype):
        return np.full(tuple(shape), -1, dtype)

    def scalar(self, value, dtype):
        return np.array(value, dtype)


def specs():
    dtypes = ["float32", "float16"]
    return [ParamSpec(f"p{i}", shape, dtypes[i % 2]) for i, shape in enumerate(SHAPES)]


def whole_tensor(index, key):
    spec = specs()[index]
    start = 1000 * index + (500 if key == "square" else 0)
    return np.arange(start, start + spec.numel, dtype="float32").reshape(spec.shape)


def held_by(layout, rank):
    """This rank's pieces of the state: a momentum of all, a square of some, counters, flags."""
    for piece in layout.pieces(rank):
        start, stop = piece.param_span
        for key in ("momentum", "square") if piece.param % 3 else ("momentum",):
            part = whole_tensor(piece.param, key).reshape(-1)[start:stop]
            yield PieceValue(piece, key, ELEMENT, "float32", None, part)
        yield PieceValue(piece, "step", SCALAR, "float64", 3.0 + piece.param)
        yield PieceValue(piece, "flag", VALUE, "", ["on", piece.param])
        if layout.partition == "parameter" and len(SHAPES[piece.param]) > 1:
            rows = whole_tensor(piece.param, "momentum").sum(1)
            yield PieceValue(piece, "rows", TENSOR, "float32", list(rows.shape), rows)


def check_whole(found, partition):
    assert set(found) == {i for i, s in enumerate(specs()) if s.numel}
    for index, values in found.items():
        elements = ("momentum", "square") if index % 3 else ("momentum",)
        rows = ["rows"] if partition == "parameter" and len(SHAPES[index]) > 1 else []
        assert list(values) == [*elements, "step", "flag", *rows]
        for key in elements:
            np.testing.assert_array_equal(values[key], whole_tensor(index, key))
        assert values["step"] == 3.0 + index and values["step"].dtype == "float64"
        assert values["flag"] == ["on", index]
        if rows:
            np.testing.assert_array_equal(values["rows"], whole_tensor(index, "momentum").sum(1))


@settings(max_examples=25, deadline=None)
@given(
    size=st.sampled_from([1, 2, 3, 4, 7, 16]),
    partition=st.sampled_from(["flat", "parameter"]),
    bucket_bytes=st.sampled_from([1, 64, 500, 10**6]),
    to=st.sampled_from([None, 0, -1]),
)
def test_the_whole_state_is_collected_where_it_is_wanted(size, partition, bucket_bytes, to):
    layout = build_layout(specs(), size, bucket_bytes=bucket_bytes, partition=partition)
    to = to if to is None else to % size

    def collect(ranks):
        held = held_by(layout, ranks.rank)
        return collect_state(ranks, layout, held, Arrays(), to=to, prefix="zero")

    for rank, found in enumerate(ThreadWorld(size).run(collect)):
        if to in (None, rank):
            check_whole(found, partition)
        else:
            assert found == {}


def test_many_ranks_send_one_shard_of_a_bucket_at_a_time_to_one_rank():
    layout = build_layout(specs(), 128, bucket_bytes=256)

    def collect(ranks):
        arrays = Arrays()
        found = collect_state(
            ranks, layout, held_by(layout, ranks.rank), arrays, to=5, prefix="zero"
        )
        return found, arrays.largest

    results = ThreadWorld(128).run(collect)
    check_whole(results[5][0], "flat")
    largest = max(b.span(0).length for b in layout.buckets)
    assert max(length for _, length in results) == largest


def test_a_layout_of_one_rank_moves_nothing_on_many():
    layout = build_layout(specs(), 1)

    def collect(ranks):
        held = held_by(layout, 0)
        found = collect_state(ranks, layout, held, Arrays(), to=1, prefix="zero")
        return found, list(ranks.log.totals())

    (first, moved), (second, _) = ThreadWorld(2).run(collect)
    assert first == {} and moved == []
    check_whole(second, "flat")


@pytest.mark.parametrize(
    ("kind", "content", "error", "match"),
    [
        (VALUE, {1: 2}, TypeError, r"state 'odd' of 'p3' is a dict"),
        (TENSOR, [9], ShardedStateError, r"state 'odd' of 'p3' has shape \(9,\).*parameter"),
    ],
)
def test_all_ranks_raise_what_one_cannot_send(kind, content, error, match):
    layout = build_layout(specs(), 4, bucket_bytes=1)

    def collect(ranks):
        held = list(held_by(layout, ranks.rank))
        if ranks.rank == 0:
            piece = next(v.piece for v in held if v.piece.param == 3)
            held.append(PieceValue(piece, "odd", kind, "float32", content, np.zeros(9)))
        with pytest.raises(error, match=match):
            collect_state(ranks, layout, held, Arrays(), to=None, prefix="zero")
        return True

    assert all(ThreadWorld(4).run(collect))


def test_the_destination_is_a_rank():
    check_destination(None, 2)
    check_destination(1, 2)
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="to must be a rank"):
            check_destination(wrong, 2)


def test_a_piece_gets_its_part_of_a_whole_state():
    layout = build_layout(specs(), 4, bucket_bytes=1)
    spec, whole = specs()[3], whole_tensor(3, "momentum")
    parts = [
        part_of(whole, piece, spec, (piece.param_span.length,), "m")
        for rank in range(4)
        for piece in layout.pieces(rank)
        if piece.param == 3
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), whole)  # it ascends
    piece = next(p for p in layout.pieces(0) if p.param == 3)
    with pytest.raises(ShardedStateError, match=r"stored with shape \(9,\).*fit 'p3'"):
        part_of(np.zeros(9), piece, spec, (piece.param_span.length,), "m")
    check_complete({"a"}, {"a", "b"}, "Adam")
    with pytest.raises(ShardedStateError, match=r"lacks \['c'\].*than Adam"):
        check_complete({"a", "c"}, {"a"}, "Adam")
