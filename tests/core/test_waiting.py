"""Ranks that need different units come through; slow ones are asked about once at most."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerohvd.communication.waiting import Timing, Waiting
from zerohvd.errors import WaitTimeoutError
from zerohvd.stage3.prefetch import Order
from zerohvd.testing import ThreadWorld

QUICK = Timing(patience=0.01, short_patience=0.002, limit=30, poll=1e-3, poll_slowly=2e-3)


class Unit:
    """Gathers one number per rank, which says how often that rank has gathered."""

    def __init__(self, collectives, number):
        self._collectives = collectives
        self.number, self.name, self.gathers = number, f"u{number}", 0
        self._out = None
        self._coming = None

    def _start(self):
        self.gathers += 1
        c = self._collectives
        self._out = np.zeros(c.size)
        own = np.array([float(self.gathers)])
        return [c.gather_into(self._out, own, [1] * c.size, name=self.name)]

    def start(self):
        """As before use, or to prefetch: nothing if it is on its way."""
        if self._coming is None:
            self._coming = self._start()

    def take_part(self):
        if self._coming is not None:  # the others are past it
            for handle in self._coming:
                handle.wait()
            self._coming = None
        return self._start()

    def end_part(self):
        assert set(self._out) == {float(self.gathers)}

    def use(self, waiting):
        self.start()
        if self._coming is not None:
            waiting.wait(self._coming, self)
            self._coming = None
        # All ranks were at the same gather of this unit: nobody has met an older one.
        assert set(self._out) == {float(self.gathers)}


class Rank:
    """One rank of a stage 3 job."""

    def __init__(self, collectives, units, timing=QUICK):
        self.c = collectives
        self.units = [Unit(collectives, number) for number in range(units)]
        self.waiting = Waiting(self.units, collectives, "w", timing)

    def backward(self, sequence, ahead=()):
        for number, next_one in zip(sequence, [*ahead, *[None] * len(sequence)], strict=False):
            self.units[number].start()
            if next_one is not None:
                self.units[next_one].start()
            self.units[number].use(self.waiting)
        self.waiting.meet()

    def step(self):
        handle = self.c.allreduce_start(np.zeros(1), name="entry")
        self.waiting.wait([handle])
        self.waiting.even_out()
        for unit in self.units:
            if unit._coming is not None:
                unit.use(self.waiting)
        # As a reduction does: blocks, and helps nobody.
        self.c.allreduce_start(np.zeros(1), name="blocking").wait()


def run(size, units, plan, timing=QUICK, timeout=60, delay=None):
    """`plan[step][rank]`: sequence of units, or None to go to step() at once."""

    def live(c):
        rank = Rank(c, units, timing)
        for step in plan:
            if step[c.rank] is not None:
                rank.backward(*step[c.rank])
            rank.step()
        return [u.gathers for u in rank.units], rank.waiting.questions

    found = ThreadWorld(size, timeout, delay).run(live)
    assert all(gathers == found[0][0] for gathers, _ in found)
    return [questions for _, questions in found]


def walks(units):
    sequence = st.lists(st.integers(0, units - 1), max_size=5)
    return st.one_of(st.none(), st.tuples(sequence), st.tuples(sequence, sequence))


@st.composite
def plans(draw):
    size, units = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    walk = walks(units)
    steps = draw(st.lists(st.lists(walk, min_size=size, max_size=size), min_size=1, max_size=3))
    return size, units, steps


@settings(max_examples=40, deadline=None)
@given(plans())
def test_ranks_that_need_different_units_in_any_order_all_come_through(plan):
    run(*plan)


@pytest.mark.parametrize("size", [16, 128])
def test_many_ranks_with_experts_of_their_own(size):
    chance = random.Random(size)
    timing = Timing(patience=0.05, short_patience=0.02, limit=60, poll=0.01, poll_slowly=0.01)

    def walk():
        experts = [chance.randrange(1, 6) for _ in range(2)]
        return None if chance.random() < 0.1 else ([0, *experts, 0], [experts[0]])

    plan = [[walk() for _ in range(size)] for _ in range(2)]
    run(size, 6, plan, timing)


def test_ranks_that_need_the_same_ask_nothing_but_to_meet():
    same = ([0, 1, 2, 1, 0], [1, 2])
    timing = Timing(patience=5, limit=30, poll=1e-3)
    assert run(4, 3, [[same] * 4] * 3, timing) == [3] * 4  # the meeting of each backward pass


@pytest.mark.parametrize("size", [2, 32])
def test_slow_gathers_are_asked_about_once_each_at_most(size):
    """Each takes ten times the patience, and ranks come at different times."""
    timing = Timing(patience=0.02, short_patience=0.002, limit=30, poll=2e-3, poll_slowly=2e-3)
    lonely = []

    def live(c):
        rank = Rank(c, 3, timing)
        for number in (0, 1, 2, 0, 1, 2):
            time.sleep(0.01 * (c.rank % 3))
            before = rank.waiting.questions
            rank.units[number].use(rank.waiting)
            assert rank.waiting.questions - before <= 1
        lonely.extend(rank.waiting._lonely)

    slow = {f"u{n}": 0.2 for n in range(3)}
    ThreadWorld(size, 60, lambda name: slow.get(name, 0.0)).run(live)
    assert not lonely  # ranks needed the same all along


def test_what_is_slow_every_time_is_not_asked_about_any_more():
    """As on a slow link. Ranks that differ after that come free all the same, and soon."""
    timing = Timing(patience=0.02, short_patience=0.002, limit=30, poll=2e-3, poll_slowly=2e-3)

    def live(c):
        rank = Rank(c, 3, timing)
        for _ in range(15):
            rank.units[0].use(rank.waiting)
        asked = rank.waiting.questions
        started = time.monotonic()
        rank.units[1 + c.rank].use(rank.waiting)
        rank.waiting.meet()
        return asked, time.monotonic() - started

    for asked, seconds in ThreadWorld(2, 60, lambda n: 0.1 if n == "u0" else 0.0).run(live):
        assert asked <= 4  # after 0.02, 0.04, 0.08 seconds, and once more where ranks are unlike
        assert seconds < 1.0


def test_slow_answers_do_not_matter_either():
    """Horovod runs one collective after the other: an answer comes behind what is slow."""
    slow = {"u0": 0.15, "u1": 0.15, "w/need": 0.15}
    timing = Timing(patience=0.02, limit=30, poll=2e-3, poll_slowly=2e-3)
    same = ([0, 1, 0, 1],)
    for questions in run(3, 2, [[same] * 3] * 2, timing, delay=lambda n: slow.get(n, 0.0)):
        assert questions <= 2 * (4 + 2 + 2)  # per step: gathers, the meeting, waits in step()


def test_a_collective_of_all_ranks_that_is_slow_is_asked_about_less_and_less():
    timing = Timing(patience=0.01, limit=30, poll=1e-3, poll_slowly=1e-3)

    def live(c):
        rank = Rank(c, 1, timing)
        rank.waiting.wait([c.allreduce_start(np.zeros(1), name="slow")])
        return rank.waiting.questions

    found = ThreadWorld(3, 60, lambda name: 0.7 if name == "slow" else 0.0).run(live)
    assert max(found) <= 7  # 0.01 + 0.02 + 0.04 + ... seconds


def test_only_units_that_ranks_need_at_different_times_get_little_patience():
    def live(c):
        rank = Rank(c, 3, Timing(patience=0.2, limit=30))
        rank.units[0].use(rank.waiting)
        rank.units[1 + c.rank].use(rank.waiting)
        rank.waiting.meet()
        return rank.waiting._lonely

    assert ThreadWorld(2).run(live) == [{1}, {2}]


def test_no_rank_leaves_a_meeting_while_another_one_needs_a_unit():
    """A question that is left over from an earlier wait for nothing must not count."""
    left = threading.Event()

    def live(c):
        rank = Rank(c, 2)
        for step in range(3):
            # Rank 0 asks in vain, as the other one is late: the question stays open.
            time.sleep(0.05 if c.rank else 0)
            rank.waiting.wait([c.allreduce_start(np.zeros(1), name="entry")])
            if c.rank == 0:
                time.sleep(0.05)
                assert not left.is_set()
                rank.units[0].use(rank.waiting)
                time.sleep(0.05)
                assert not left.is_set(), step
            rank.waiting.meet()
            if c.rank == 1:
                left.set()
            c.barrier()
            left.clear()
            c.barrier()

    ThreadWorld(2).run(live)


@pytest.mark.parametrize("where", ["unit", "meet", "step"])
def test_a_rank_that_never_comes(where):
    timing = Timing(patience=0.01, limit=0.5, poll=1e-3, poll_slowly=1e-3)
    over = threading.Barrier(3)

    def live(c):
        rank = Rank(c, 2, timing)
        rank.units[0].use(rank.waiting)
        if c.rank == 2:
            over.wait(20)
            return
        start = time.monotonic()
        act = {
            "unit": lambda: rank.units[1 if c.rank else 0].use(rank.waiting),
            "meet": rank.waiting.meet,
            "step": rank.step,
        }[where]
        expected = f"'u{c.rank}'" if where == "unit" else "a meeting of all ranks"
        with pytest.raises(WaitTimeoutError, match=f"rank {c.rank} .*{expected}.*ZEROHVD_TIMEOUT"):
            act()
        assert 0.4 < time.monotonic() - start < 3
        over.wait(20)

    ThreadWorld(3).run(live)


def test_the_limit_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("ZEROHVD_GATHER_TIMEOUT", "7.5")
    assert Timing().limit == 7.5


def test_a_rank_on_its_own_asks_nobody():
    assert run(1, 2, [[([0, 1, 0],)]] * 2) == [0]


def test_ranks_that_failed_in_a_meeting_meet_again():
    """One rank has counted one meeting more than the other."""

    def live(c):
        rank = Rank(c, 1)
        done = c.allreduce_start(np.zeros(1), name="mine")
        if c.rank:
            rank.waiting.wait([done])
        rank.waiting.meet()
        rank.backward([0])
        rank.step()

    ThreadWorld(2).run(live)


# -- prefetch order ------------------------------------------------------------------------------


def test_the_order_of_the_pass_before_is_expected():
    order = Order()
    for _ in range(2):
        order.restart()
        found = [order.after(unit) for unit in (0, 0, 1, 2, 3)]
    assert found == [1, 1, 2, 3, None]
    order.restart()
    assert order.after(0) == 1
    assert order.expected(0, 2) == [1, 2]
    assert order.after(9) is None  # another way this time
    assert order.after(2) == 3
    assert not order.is_last(2)
    order.after(3)
    assert order.is_last(3)


@given(st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=6))
def test_a_pass_that_repeats_is_predicted_from_its_second_time_on(passes):
    order = Order()
    for sequence in passes:
        distinct = [u for i, u in enumerate(sequence) if not i or sequence[i - 1] != u]
        for _ in range(2):
            order.restart()
            found = [order.after(unit) for unit in distinct]
        if distinct:
            assert found == [*distinct[1:], None]
