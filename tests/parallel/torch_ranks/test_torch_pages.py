"""Ranges of memory that hand their pages to each other."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerohvd.torch import pages
from zerohvd.torch.shard_memory import ShardMemory

HUGE = 2 << 20
SIZES = [1, 4096, 100_000, HUGE - 5, HUGE, HUGE + 8192, 5 * HUGE + 100]


@pytest.fixture
def pool():
    return pages.Pool()


def test_what_one_range_frees_the_next_one_uses(pool):
    first, second = pages.Range(5 * HUGE + 100_000, pool), pages.Range(5 * HUGE + 100_000, pool)
    first.allocate()
    first.tensor.fill_(7)
    first.free()
    second.allocate()
    assert second.tensor.eq(7).all(), "these are other pages"
    assert pool.nbytes == 0


def test_one_large_range_is_enough_for_several_small_ones(pool):
    large = pages.Range(6 * HUGE, pool)
    large.allocate()
    large.tensor.fill_(7)
    large.free()
    small = [pages.Range(2 * HUGE, pool) for _ in range(3)]
    for range_ in small:
        range_.allocate()
    assert all(range_.tensor.eq(7).all() for range_ in small)
    for range_ in small:
        range_.free()
    large.allocate()  # of pages from three places
    assert large.tensor.eq(7).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["use", "free", "forget", "trim"]))))
def test_values_stay_whatever_happens_to_other_ranges(steps):
    pool = pages.Pool()
    ranges = {n: pages.Range(SIZES[n % len(SIZES)], pool) for n in range(8)}
    for number, act in steps:
        if act == "use":
            ranges[number].allocate()
            ranges[number].tensor.fill_(number)
        elif act == "free":
            ranges[number].free()
        elif act == "trim":
            pool.trim(keep=number * HUGE)
            assert pool.nbytes <= number * HUGE
        else:
            ranges[number].free()
            ranges[number] = pages.Range(SIZES[number % len(SIZES)], pool)
        for other, range_ in ranges.items():
            assert not range_.there or range_.tensor.eq(other).all()


@st.composite
def ranges_with_kept_parts(draw):
    """Bytes of a range, and cuts: of the parts between them, every other one is kept."""
    nbytes = draw(st.sampled_from(SIZES))
    cuts = sorted(draw(st.lists(st.integers(0, nbytes), max_size=6)))
    return nbytes, list(zip(cuts[::2], cuts[1::2], strict=False))


@settings(max_examples=60, deadline=None)
@given(st.lists(ranges_with_kept_parts(), min_size=2, max_size=4), st.data())
def test_parts_that_are_kept_have_their_values_for_ever(wanted, data):
    pool = pages.Pool()
    ranges = [pages.Range(nbytes, pool, kept) for nbytes, kept in wanted]
    for number, range_ in enumerate(ranges):
        for part in range_.kept:
            part.fill_(100 + number)
    for number in data.draw(st.lists(st.integers(0, len(ranges) - 1), max_size=12)):
        ranges[number].allocate()
        for other, (range_, (_, kept)) in enumerate(zip(ranges, wanted, strict=True)):
            for part, (start, stop) in zip(range_.kept, kept, strict=True):
                assert part.eq(100 + other).all()
                if range_.there:
                    assert torch.equal(range_.tensor[start:stop], part), "not in its place"
        for start, stop in _others(*wanted[number]):
            ranges[number].tensor[start:stop] = number
        if data.draw(st.booleans()):
            ranges[number].free()
        if data.draw(st.booleans()):
            pool.trim()


def _others(nbytes, kept):
    ends = [0, *(end for part in kept for end in part), nbytes]
    return list(zip(ends[::2], ends[1::2], strict=True))


def test_only_what_is_not_kept_is_given_to_others(pool):
    kept = [(0, 3 * HUGE), (5 * HUGE, 6 * HUGE + 4096)]
    range_ = pages.Range(8 * HUGE, pool, kept)
    range_.allocate()
    range_.free()
    assert pool.nbytes == range_.loose == 4 * HUGE - 4096


def test_of_what_is_not_kept_as_much_as_can_be_is_huge_pages(pool):
    half = 2 * HUGE + 8192  # of a bucket, with a little besides the large weights
    first = pages.Range(2 * half, pool, [(0, half)])
    second = pages.Range(2 * half, pool, [(half, 2 * half)])
    for range_ in (first, second):
        assert [piece.nbytes for piece in range_.pieces] == [HUGE, HUGE, 8192]


def test_a_process_has_only_so_many_mappings(monkeypatch):
    here = torch.device("cpu")
    monkeypatch.setattr(pages, "_MOST_KEPT", pages.Range.parts + 2)
    assert pages.can_keep(2, here) and not pages.can_keep(3, here)
    range_ = pages.Range(100_000, pages.POOL, [(0, 10), (50_000, 60_000)])
    assert not pages.can_keep(1, here)
    del range_
    assert pages.can_keep(2, here)


def test_where_pages_cannot_be_moved_there_are_fresh_ones(pool):
    range_ = pages.Range(2 * HUGE + 4096, pool)
    range_.allocate()
    range_.tensor.fill_(7)
    nowhere = mmap.mmap(-1, 4 * HUGE)
    address = torch.frombuffer(nowhere, dtype=torch.uint8).data_ptr()
    nowhere.close()  # nothing is mapped there any more
    pages._move(address, pages.Piece(range_.address, range_.nbytes))
    pages.LIBC.mprotect(range_.address, range_.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
    assert range_.tensor.eq(0).all()


def test_a_pool_does_not_grow_without_end(pool, monkeypatch):
    monkeypatch.setattr(pages, "_MOST_IDLE", 3 * HUGE)
    ranges = [pages.Range(2 * HUGE, pool) for _ in range(4)]
    for range_ in ranges:
        range_.allocate()
    for range_ in ranges:
        range_.free()
    assert pool.nbytes == 3 * HUGE


def test_the_memory_of_gradients_says_what_is_still_to_come():
    lengths = [100_000, 1, 300_000]
    memory = ShardMemory(lengths, [torch.float32] * 3, [torch.device("cpu")] * 3)
    assert sum(lengths) * 4 <= memory.missing < sum(lengths) * 4 + 300
    part = memory.of(2).fill_(7)
    assert memory.missing == 0
    memory.drop()
    assert memory.missing > 0
    memory.of(2).zero_()
    assert part.eq(7).all(), "what somebody looks at is not taken away"
    memory.drop()
    pages.POOL.trim()
