"""Buckets go out complete, once, and in the same order on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import layouts

from zerohvd.layout import ParamSpec, build_layout
from zerohvd.schedule import Schedule


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
