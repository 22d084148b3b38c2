"""Packing without a framework: the same codecs on numpy arrays."""

from __future__ import annotations

import numpy as np
import pytest

from zerohvd.compression.codecs import (
    BLOCK,
    BlockCodec,
    CastCodec,
    RandomKCodec,
    TopKCodec,
    codec_of,
)
from zerohvd.compression.feedback import Waiting, pack_with_feedback
from zerohvd.compression.policies import Compression as C
from zerohvd.compression.policies import check_gradients, check_params

SIZES = [1, 2, 3, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 77]


class Numpy:
    """The operations that packing needs, of numpy."""

    rows = staticmethod(lambda x, width: x.reshape(-1, width))
    flat = staticmethod(lambda x: x.reshape(-1))
    largest = staticmethod(lambda rows: np.abs(rows).max(1))
    float32 = staticmethod(lambda x: x.astype(np.float32))
    pad = staticmethod(lambda x, length: np.pad(x, (0, length - len(x))))
    concat = staticmethod(np.concatenate)
    take = staticmethod(lambda x, places: x[places])
    column = staticmethod(lambda rows, index: rows[:, index])
    finite_or_zero = staticmethod(lambda x: np.where(np.isfinite(x), x, 0).astype(np.float32))
    where_zero = staticmethod(lambda of, x: np.where(of == 0, x, 0).astype(np.float32))

    def inverse(self, scales, least):
        with np.errstate(divide="ignore"):
            return np.where(scales >= least, 1 / scales, 0).astype(np.float32)

    def encode(self, rows, factors, offset):
        with np.errstate(invalid="ignore"):
            return (rows * factors[:, None] + np.float32(offset)).astype(np.uint8)

    def decode(self, codes, factors, offset):
        with np.errstate(invalid="ignore", over="ignore"):
            return (codes.astype(np.float32) - np.float32(offset)) * factors[:, None]

    def join_halves(self, codes):
        low, high = np.split(codes, 2, 1)
        return low | high << 4

    def split_halves(self, codes):
        return np.concatenate([codes & 15, codes >> 4], 1)

    def to_bytes(self, x, dtype):
        if dtype == "bfloat16":
            bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            kept = np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
            return kept.view(np.uint8)
        return np.ascontiguousarray(x, dtype).view(np.uint8)

    def from_bytes(self, data, dtype):
        if dtype == "bfloat16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return data.view(dtype)

    def top(self, x, count):
        return np.argsort(-np.nan_to_num(np.abs(x), nan=np.inf), kind="stable")[:count].astype("i4")

    def put(self, values, places, length):
        made = np.zeros(length, np.float32)
        made[places] = values
        return made

    def with_column(self, values, index, width):
        made = np.zeros((len(values), width), np.float32)
        made[:, index] = values
        return made.reshape(-1)


OPS = Numpy()


def through(codec, x, turn=0):
    data = codec.pack(OPS, x, turn)
    assert data.dtype == np.uint8 and len(data) == codec.nbytes(len(x)) and len(data) % 2 == 0
    return codec.unpack(OPS, data, len(x), turn)


def numbers(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_are_wrong_by_half_a_step_at_most(bits, count):
    x = numbers(count) * np.logspace(-20, 20, count).astype(np.float32)
    y = through(BlockCodec(bits), x)
    for start in range(0, count, BLOCK):
        block, found = x[start : start + BLOCK], y[start : start + BLOCK]
        step = np.abs(block).max() / (2 ** (bits - 1) - 1)
        assert np.abs(block - found).max() <= 0.51 * step


@pytest.mark.parametrize(("bits", "times"), [(8, 3.9), (4, 7.5)])
def test_bytes_of_blocks(bits, times):
    assert 4 * (1 << 20) / BlockCodec(bits).nbytes(1 << 20) > times
    # Small parts do not become larger than they were.
    assert all(BlockCodec(bits).nbytes(n) <= 4 * n for n in range(1, 300))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_its_block_so_and_no_other(bits, bad):
    x = numbers(3 * BLOCK + 5)
    x[BLOCK + 3] = bad
    y = through(BlockCodec(bits), x)
    assert not np.isfinite(y[BLOCK : 2 * BLOCK]).any()
    assert np.isfinite(np.delete(y, range(BLOCK, 2 * BLOCK))).all()
    x[-1] = bad
    assert not np.isfinite(through(BlockCodec(bits), x)[-5:]).any()


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_denormals_become_zeros(bits):
    assert not through(BlockCodec(bits), np.zeros(300, np.float32)).any()
    assert not through(BlockCodec(bits), np.full(300, 1e-41, np.float32)).any()
    mixed = np.full(300, 1e-41, np.float32)
    mixed[5] = 1.0
    found = through(BlockCodec(bits), mixed)
    assert np.flatnonzero(found).tolist() == [5] and abs(found[5] - 1.0) < 0.004


def test_huge_and_tiny_numbers_in_one_block():
    x = np.array([3e38, 1e-38, -3e38, 1.0], np.float32)
    y = through(BlockCodec(8), x)
    assert np.isfinite(y).all() and y[1] == y[3] == 0.0
    np.testing.assert_allclose(y[[0, 2]], x[[0, 2]], rtol=0.01)


@pytest.mark.parametrize("count", SIZES)
def test_the_largest_travel_with_their_places(count):
    x = numbers(count)
    y = through(TopKCodec(0.1), x)
    kept = np.flatnonzero(y)
    assert len(kept) == -(-count // 10) and np.array_equal(x[kept], y[kept])
    assert np.abs(np.delete(x, kept)).max(initial=0.0) <= np.abs(x[kept]).min()
    assert 4 * 100_000 / TopKCodec(0.01).nbytes(100_000) > 40


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.3, 0.1, 0.01])
def test_every_gradient_has_its_turn(ratio):
    codec, x = RandomKCodec(ratio, seed=3), np.ones(1003, np.float32)
    turns = round(1 / ratio)
    total = sum(through(codec, x, turn) for turn in range(turns))
    assert np.array_equal(total, x)


@pytest.mark.parametrize("policy", [C.int8, C.int4, C.topk(0.05), C.randomk(0.2)], ids=str)
def test_what_has_not_travelled_travels_later(policy):
    codec, x = codec_of(policy), numbers(500)
    waiting, arrived = Waiting(np.zeros(500, np.float32)), np.zeros(500, np.float32)
    for turn in range(60):
        data, waiting = pack_with_feedback(OPS, codec, x, waiting, turn)
        arrived += codec.unpack(OPS, data, 500, turn)
    np.testing.assert_allclose(arrived + waiting.kept, 60 * x, rtol=1e-3, atol=1e-3)
    # Nothing waits for ever.
    assert np.abs(waiting.kept).max() < 25 * np.abs(x).max()


@pytest.mark.parametrize("policy", [C.int4, C.topk(0.05), C.randomk(0.2)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_overflow_travels_at_once_and_does_not_wait(policy, bad):
    codec = codec_of(policy)
    for place in (0, 7, 499):
        x = numbers(500)
        x[place] = bad
        data, waiting = pack_with_feedback(OPS, codec, x, Waiting(np.zeros(500, np.float32)), 0)
        assert not np.isfinite(codec.unpack(OPS, data, 500, 0)).all()
        assert np.isfinite(waiting.kept).all()


def test_momentum_is_lost_by_what_leaves():
    codec, x = TopKCodec(0.5), np.array([4.0, 1.0], np.float32)
    before = Waiting(np.zeros(2, np.float32), np.zeros(2, np.float32))
    first = pack_with_feedback(OPS, codec, x, before, 0, momentum=0.5)
    assert first.waiting.kept.tolist() == [0.0, 1.0]
    assert first.waiting.momentum.tolist() == [0.0, 1.0]
    second = pack_with_feedback(OPS, codec, np.zeros(2, np.float32), first.waiting, 1, momentum=0.5)
    assert codec.unpack(OPS, second.data, 2, 1).tolist() == [0.0, 1.5]


def test_sixteen_bits():
    x = numbers(333)
    assert np.array_equal(through(CastCodec("float16"), x), x.astype(np.float16).astype(np.float32))


def test_the_ratio_goes_down_in_the_warm_up():
    policy = C.topk(0.01, warmup_steps=8)
    ratios = [policy.ratio_at(step) for step in range(10)]
    assert ratios[0] == ratios[1] == 0.25 and ratios[8] == ratios[9] == 0.01
    assert ratios == sorted(ratios, reverse=True)


def test_policies_are_values_and_say_what_they_are():
    assert C.topk(0.01) == C.topk(0.01) != C.topk(0.02)
    assert [str(p) for p in (C.none, C.fp16, C.bf16, C.int8, C.int4, C.topk(0.01))] == [
        "none", "fp16", "bf16", "int8", "int4", "topk(0.01)"
    ]
    with pytest.raises(AttributeError):
        C.int8.bits = 2


@pytest.mark.parametrize("ratio", [0, -1, 1.5, "a", True, None])
def test_a_ratio_is_a_share(ratio):
    with pytest.raises(ValueError, match="greater than 0 and at most 1"):
        C.topk(ratio)
    with pytest.raises(ValueError, match="greater than 0 and at most 1"):
        C.randomk(ratio)


@pytest.mark.parametrize(
    "options", [{"momentum": 1.0}, {"clip": 0.0}, {"warmup_steps": -1}, {"warmup_steps": 2.5}]
)
def test_options_of_topk_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        C.topk(0.1, **options)


def test_where_policies_may_be_used():
    for stage in (1, 2, 3):
        assert check_gradients(C.int8, stage) is C.int8
        assert check_params(C.int4, stage) is C.int4
    assert check_gradients(C.bf16, 0) is C.bf16
    for policy in (C.int8, C.int4, C.topk(0.1), C.randomk(0.1)):
        with pytest.raises(ValueError, match="stage=1"):
            check_gradients(policy, 0)
    with pytest.raises(ValueError, match="none travel"):
        check_params(C.bf16, 0)
    with pytest.raises(ValueError, match="for gradients"):
        check_params(C.topk(0.1), 2)
