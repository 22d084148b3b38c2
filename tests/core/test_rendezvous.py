"""Ranks that make different calls find out, all of them, and who made which."""

from __future__ import annotations

import re
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerohvd.communication import rendezvous
from zerohvd.communication.instances import agree_on_instance
from zerohvd.communication.rendezvous import Call, Rendezvous, different_calls
from zerohvd.communication.waiting import Timing, Waiting
from zerohvd.errors import DisagreementError
from zerohvd.testing import ThreadWorld

STEP = {"call": Call.STEP, "trainable": [True, False]}


def said_on_each_rank(claims):
    """What each rank's check() raised, or None."""

    def rank(c):
        meeting = Rendezvous(c, "agree")
        for _ in range(2):  # ranks that differed may go on
            meeting.open(**claims[c.rank])
            try:
                meeting.check()
                found = None
            except DisagreementError as error:
                found = str(error)
        return found

    return ThreadWorld(len(claims)).run(rank)


@pytest.mark.parametrize("size", [1, 2, 5, 128])
def test_ranks_that_agree_pass(size):
    assert said_on_each_rank([STEP] * size) == [None] * size


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"call": Call.STATE}, "rank 0 state_dict(), ranks [1, 2] backward() or step()"),
        ({"trainable": [True, True]}, "rank 0 unlike ranks [1, 2]). Freeze"),
        ({"weighted": True}, "rank 0 gave a weight, ranks [1, 2] gave no weight for this step"),
        ({"passes": 4}, "is 4 on rank 0, 1 on ranks [1, 2]"),
        ({"options": "lr=2"}, "rank 0 unlike ranks [1, 2]). Set rates and call load_state_dict()"),
    ],
)
def test_the_error_names_the_ranks_and_is_the_same_on_all(other, expected):
    found = said_on_each_rank([{**STEP, **other}, STEP, STEP])
    assert expected in found[0]
    assert found == [found[0]] * 3


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "call": st.sampled_from(Call),
                "trainable": st.lists(st.booleans(), max_size=2),
                "weighted": st.booleans(),
                "passes": st.integers(1, 3),
                "options": st.sampled_from(["", "a", "b"]),
            }
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_difference_is_seen_by_all(claims):
    found = said_on_each_rank(claims)
    assert found == [found[0]] * len(claims)
    assert (found[0] is None) == all(c == claims[0] for c in claims)


def test_a_hundred_and_twenty_eight_ranks_one_of_which_saves():
    claims = [STEP] * 128
    claims[77] = {**STEP, "call": Call.SAVE}
    found = said_on_each_rank(claims)
    assert "rank 77 zero.save()" in found[0] and found == [found[0]] * 128


def test_a_rank_that_never_tells_does_not_keep_the_others(monkeypatch):
    """It has opened the rendezvous, and fails before it checks."""
    monkeypatch.setattr(rendezvous, "DETAILS_PATIENCE", 0.2)
    raised = threading.Barrier(3)

    def rank(c):
        meeting = Rendezvous(c, "agree", Waiting([], c, "w") if c.rank else None)
        meeting.open(Call.STEP if c.rank == 2 else Call.STATE, [])
        if c.rank == 2:
            raised.wait(10)
            return
        with pytest.raises(DisagreementError, match=r"some ranks backward.*, others state_dict"):
            meeting.check()
        raised.wait(10)

    ThreadWorld(3).run(rank)


def test_open_does_not_wait():
    def rank(c):
        meeting = Rendezvous(c, "agree")
        start = time.monotonic()
        if c.rank:
            time.sleep(0.3)
        meeting.open(Call.STEP, [])
        opened = time.monotonic() - start
        meeting.check()
        return opened

    assert ThreadWorld(2).run(rank)[0] < 0.25


def test_calls_that_ranks_have_heard_of_each_other():
    assert different_calls([Call.SAVE] * 3) is None
    found = str(different_calls([Call.SAVE, Call.LOAD]))
    assert re.search(r"rank 0 zero.save\(\), rank 1 zero.load\(\)", found)
    assert "same kind of data" in str(different_calls([Call.FIT, Call.FIT_COUNTED, Call.FIT]))


def test_instances_are_numbered_alike_whatever_a_rank_has_made_before():
    def rank(c):
        counters = {0: 3} if c.rank == 1 else {}  # rank 1 has made more, or is no newcomer
        first = [agree_on_instance(c, 0, counters) for _ in range(3)]
        other_set = agree_on_instance(c, 7, counters)
        return [*first, other_set]

    assert ThreadWorld(4).run(rank) == [[3, 4, 5, 0]] * 4


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_no_rank_has_used_the_number_before(made):
    found = ThreadWorld(len(made)).run(lambda c: agree_on_instance(c, 0, {0: made[c.rank]}))
    assert found == [max(made)] * len(made)


def test_a_rendezvous_serves_ranks_that_need_units_while_it_waits():
    """Rank 0 is in step() already while rank 1 still has to gather a unit."""

    class Unit:
        number, name, gathers = 0, "unit", 0

        def __init__(self, c):
            self.c = c

        def take_part(self):
            import numpy as np

            self.gathers += 1
            return [self.c.allreduce_start(np.zeros(1), name="unit")]

        def end_part(self): ...

    def rank(c):
        unit = Unit(c)
        waiting = Waiting([unit], c, "w", Timing(patience=0.01, limit=10))
        meeting = Rendezvous(c, "agree", waiting)
        if c.rank == 1:
            for _ in range(3):
                waiting.wait(unit.take_part(), unit)
        meeting.open(Call.STEP, [])
        meeting.check()
        waiting.meet()  # rank 0 may have asked once more while rank 1 was on its way here
        return unit.gathers

    assert ThreadWorld(2).run(rank) == [3, 3]
