"""Buckets go out complete, once, and in the same order on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import layouts

from zerohvd.layout import ParamSpec, build_layout
from zerohvd.schedule import Schedule, cut_waves, exchange_rounds


@st.composite
def rounds(draw):
    """A layout, frozen parameters, and the order in which the others report, or do not."""
    layout = draw(layouts())
    params = range(len(layout.params))
    frozen = draw(st.sets(st.sampled_from(params))) if params else set()
    reported = draw(st.permutations(params))
    used = draw(st.integers(0, len(reported)))
    return layout, frozen, reported[:used]


@given(rounds())
def test_any_order_of_gradients_gives_every_bucket_once_and_in_order(case):
    layout, frozen, reported = case
    schedule = Schedule(layout)
    schedule.start_round(frozen)
    sent = [bucket for param in reported for bucket in schedule.ready(param)]
    sent += schedule.flush()
    assert sent == list(range(len(layout.buckets)))
    assert schedule.finished


@given(rounds())
def test_a_bucket_goes_out_only_when_all_its_gradients_are_there(case):
    layout, frozen, reported = case
    schedule = Schedule(layout)
    schedule.start_round(frozen)
    seen = set(frozen)
    for param in reported:
        seen.add(param)
        for bucket in schedule.ready(param):
            assert {s.param for s in layout.buckets[bucket].slots} <= seen


@given(layouts())
def test_a_full_backward_pass_leaves_nothing_to_flush(layout):
    schedule = Schedule(layout)
    for param in reversed(range(len(layout.params))):
        schedule.ready(param)
    assert schedule.finished
    assert list(schedule.flush()) == []


@given(layouts())
def test_in_model_order_every_bucket_goes_out_as_soon_as_it_is_complete(layout):
    schedule = Schedule(layout)
    for param in reversed(range(len(layout.params))):
        expected = [b.index for b in layout.buckets if min(s.param for s in b.slots) == param]
        assert list(schedule.ready(param)) == expected


def two_buckets():
    return Schedule(build_layout([ParamSpec("a", (4,)), ParamSpec("b", (4,))], 2, bucket_bytes=16))


def test_rounds_do_not_know_each_other():
    schedule = two_buckets()
    assert not schedule.started
    schedule.ready(0)
    assert schedule.started and schedule.has_seen(0) and not schedule.has_seen(1)
    schedule.flush()
    schedule.start_round()
    assert not schedule.started and not schedule.has_seen(0)
    assert [list(schedule.ready(p)) for p in (1, 0)] == [[0], [1]]


def test_frozen_parameters_are_not_waited_for():
    schedule = two_buckets()
    schedule.start_round(frozen=[1])
    assert list(schedule.ready(0)) == [0, 1]


def test_a_frozen_parameter_may_report_all_the_same():
    schedule = two_buckets()
    schedule.start_round(frozen=[1])
    assert list(schedule.ready(1)) == [0]
    assert list(schedule.ready(0)) == [1]


def test_a_gradient_reported_twice_is_an_error_that_names_it():
    schedule = two_buckets()
    schedule.ready(1)
    with pytest.raises(ValueError, match="the gradient of 'b' was reported twice"):
        schedule.ready(1)


def test_a_gradient_that_comes_after_the_flush_sends_nothing_again():
    schedule = two_buckets()
    assert list(schedule.flush()) == [0, 1]
    assert list(schedule.ready(0)) == []


def test_waves_hold_every_bucket_once_in_order_and_about_equal_bytes():
    layouts = [
        build_layout([ParamSpec(f"{n}.{i}", (100,)) for i in range(n)], 2, bucket_bytes=400)
        for n in (3, 1, 6)
    ]
    for count in (1, 2, 3):
        waves = cut_waves(layouts, count)
        assert len(waves) == count
        every = [(i, b) for wave in waves for i, buckets in wave for b in buckets]
        assert every == [(i, b) for i, n in enumerate((3, 1, 6)) for b in range(n)]
        sizes = [sum(len(buckets) for _, buckets in wave) for wave in waves]
        assert max(sizes) <= -(-10 // count)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=9))
def test_an_exchange_in_rounds_sends_every_element_once(lengths):
    rounds = exchange_rounds(lengths, 16)
    starts = [sum(lengths[:r]) for r in range(len(lengths))]
    for rank, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        spans = [spans[rank] for spans in rounds]
        assert [i for s in spans for i in range(*s)] == list(range(start, start + length))
        assert all((s.start - start) % 16 == 0 for s in spans if s.length)
    assert len(rounds) == 1 or all(any(s.length for s in spans) for spans in rounds)
    # What a rank receives is about what it sends, however unequal the parts are.
    for spans in rounds:
        received = len(lengths) * max(s.length for s in spans)
        assert received <= sum(lengths) + len(lengths) * 16
