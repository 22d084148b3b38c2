"""Every bucket of every round leaves once on every rank, in one order, and the sums are right."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerohvd.communication import weighting
from zerohvd.communication.rounds import Rounds, check_passes
from zerohvd.layout import ParamSpec, build_layout
from zerohvd.schedule import Schedule
from zerohvd.testing import ThreadWorld

IN_FLIGHT = 2


class FakeReducer:
    """Sums whole buckets with allreduces; notes the order in which they leave."""

    def __init__(self, section):
        self._section = section
        self.weight = None
        self.sent = []  # over all steps
        self._pending = []
        self.begin_step()

    def begin_step(self):
        assert not self._pending
        self.arrived = set()
        layout = self._section.layout
        self._taken = np.zeros(len(layout.params))
        self.sums = [np.zeros(len(b.slots)) for b in layout.buckets]

    def take(self, index):
        self.arrived.add(index)
        self._taken[index] += self._section.grads.pop(index)

    def has_room(self, b, patience):
        deadline = time.monotonic() + patience
        while len(self._pending) >= IN_FLIGHT:
            if not self._pending[0][1].done():
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-3)
            else:
                self._end()
        return True

    def settle(self, patience):
        deadline = time.monotonic() + patience
        while self._pending:
            if not self._pending[0][1].done():
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-3)
            else:
                self._end()
        return True

    def send(self, b):
        while any(bucket == b for bucket, _, _ in self._pending):
            self._end()
        members = [s.param for s in self._section.layout.buckets[b].slots]
        values = self._taken[members] * (1.0 if self.weight is None else self.weight)
        self._taken[members] = 0.0
        self.sent.append(b)
        name = f"{self._section.name}/b{b}"
        handle = self._section.collectives.allreduce_start(values, name=name)
        self._pending.append((b, handle, values))

    def finish(self):
        while self._pending:
            self._end()

    def _end(self):
        b, handle, values = self._pending.pop(0)
        handle.wait()
        self.sums[b] += values


class FakeSection:
    """Parameters of one number each, two per bucket."""

    def __init__(self, collectives, name, params):
        self.collectives, self.name = collectives, name
        specs = [ParamSpec(f"{name}.{i}", (1,), "float32") for i in range(params)]
        self.layout = build_layout(specs, 1, bucket_bytes=128)
        self.schedule = Schedule(self.layout)
        self.param_names = [s.name for s in specs]
        self.grads = {}
        self.off = ()
        self.reducer = FakeReducer(self)

    def frozen(self):
        return self.off

    def with_gradient(self):
        return sorted(self.grads)

    def totals(self):
        """Per parameter: the sum over ranks and passes."""
        found = np.zeros(len(self.param_names))
        for bucket, sums in zip(self.layout.buckets, self.reducer.sums, strict=True):
            found[[s.param for s in bucket.slots]] = sums
        return found.tolist()


def live(c, sizes, steps, *, stage, passes, weights=None):
    """Run steps; `steps[s][rank][pass]` is (local, [(section, param), ...] in order of arrival)."""
    sections = [FakeSection(c, f"s{i}", n) for i, n in enumerate(sizes)]
    rounds = Rounds(c, stage=stage, passes=passes, prefix="t")
    for section in sections:
        rounds.add(section)
    totals = []
    for step in steps:
        rounds.notice_frozen()
        rounds.weight = None if weights is None else weights[c.rank]
        for local, arrivals in step[c.rank]:
            for number, index in arrivals:
                grads = sections[number].grads
                grads[index] = grads.get(index, 0.0) + 1.0 + c.rank
                (rounds.accumulated if local else rounds.arrived)(number, index)
        rounds.send_rest()
        for section in sections:
            section.reducer.finish()
        totals.append([section.totals() for section in sections])
        rounds.begin_step()
    return totals, [section.reducer.sent for section in sections]


def expected(sizes, step, weights=None):
    found = [[0.0] * n for n in sizes]
    for rank, passes in enumerate(step):
        for _, arrivals in passes:
            for number, index in arrivals:
                found[number][index] += (1.0 + rank) * (weights[rank] if weights else 1.0)
    return found


def check(size, sizes, steps, *, stage, passes, weights=None):
    results = ThreadWorld(size).run(
        lambda c: live(c, sizes, steps, stage=stage, passes=passes, weights=weights)
    )
    rounds = passes if stage >= 2 else 1
    for totals, sent in results:
        for found, step in zip(totals, steps, strict=True):
            assert found == expected(sizes, step, weights)
        for number, buckets in enumerate(sent):
            once = list(range(-(-sizes[number] // 2)))  # two parameters each
            assert buckets == once * rounds * len(steps)


@st.composite
def jobs(draw):
    size = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    passes = draw(st.integers(1, 3))
    everything = [(s, i) for s, n in enumerate(sizes) for i in range(n)]
    used = st.permutations(everything).flatmap(
        lambda order: st.integers(0, len(order)).map(lambda cut: order[cut:])
    )
    one = st.lists(st.tuples(st.just(False), used), max_size=passes) | st.lists(
        st.tuples(st.just(True), used), max_size=2
    )
    steps = draw(st.lists(st.lists(one, min_size=size, max_size=size), min_size=1, max_size=3))
    return size, sizes, steps, passes


@settings(max_examples=40, deadline=None)
@given(jobs(), st.sampled_from([0, 1, 2, 3]))
def test_any_order_unused_params_missing_passes_and_no_sync(job, stage):
    size, sizes, steps, passes = job
    check(size, sizes, steps, stage=stage, passes=passes)


@pytest.mark.parametrize(("size", "stage"), [(64, 2), (128, 1), (128, 2)])
def test_many_ranks(size, stage):
    chance = random.Random(size)
    sizes, passes = [4, 3, 2], 2
    everything = [(s, i) for s, n in enumerate(sizes) for i in range(n)]

    def one_pass():
        return False, chance.sample(everything, chance.randint(0, len(everything)))

    steps = [
        [[one_pass() for _ in range(chance.randint(0, passes))] for _ in range(size)]
        for _ in range(2)
    ]
    check(size, sizes, steps, stage=stage, passes=passes)


def test_weights_multiply_what_a_rank_sends():
    order = [(0, 0), (0, 1), (1, 0)]
    steps = [[[(False, order)], [(False, order[::-1])], []]]
    check(3, [2, 1], steps, stage=2, passes=1, weights=[3.0, 0.5, 0.0])


def test_sections_leave_in_the_order_in_which_rank_0_completed_them():
    left = []

    def run(c):
        sections = [FakeSection(c, f"s{i}", 1) for i in range(3)]
        rounds = Rounds(c, stage=2, passes=1, prefix="t")
        for section in sections:
            rounds.add(section)
        for step in range(2):
            # Rank 0 completes 2, 0, 1; the other rank 0, 1, 2.
            for number in (2, 0, 1) if c.rank == 0 else (0, 1, 2):
                sections[number].grads[0] = 1.0
                rounds.arrived(number, 0)
                if c.rank == 0 and step == 1:
                    left.append([len(s.reducer.sent) - 1 for s in sections])
            rounds.send_rest()
            for section in sections:
                section.reducer.finish()
            rounds.begin_step()

    ThreadWorld(2).run(run)
    assert left == [[0, 0, 1], [1, 0, 1], [1, 1, 1]]


def test_a_frozen_parameter_is_not_waited_for():
    def run(c):
        section = FakeSection(c, "s", 4)
        rounds = Rounds(c, stage=2, passes=1, prefix="t")
        rounds.add(section)
        section.off = (2,)
        rounds.notice_frozen()
        section.grads[3] = 1.0  # the first bucket holds the last parameters
        rounds.arrived(0, 3)
        early = list(section.reducer.sent)
        rounds.send_rest()
        section.reducer.finish()
        return early, section.reducer.sent

    assert ThreadWorld(2).run(run) == [([0], [0, 1])] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_one_pass_too_many_is_refused_by_name(stage):
    def run(c):
        section = FakeSection(c, "layer", 2)
        rounds = Rounds(c, stage=stage, passes=1, prefix="t")
        rounds.add(section)
        section.grads[1] = 1.0
        rounds.arrived(0, 1)
        for again in (rounds.arrived, rounds.accumulated):
            with pytest.raises(RuntimeError, match=r"'layer.1'.*backward_passes_per_step=1 times"):
                again(0, 1)

    ThreadWorld(2).run(run)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_pause_between_passes_and_going_on_elsewhere(stage):
    """As for a checkpoint: what has been reduced is kept, and later passes add to it."""

    def run(c):
        section = FakeSection(c, "s", 3)
        rounds = Rounds(c, stage=stage, passes=3, prefix="t")
        rounds.add(section)
        for index in range(3):
            section.grads[index] = 1.0
            rounds.arrived(0, index)
        assert rounds.more_to_come()
        rounds.pause()
        kept, grads = section.reducer.sums, dict(section.grads)
        other = FakeSection(c, "s", 3)
        rest = Rounds(c, stage=stage, passes=3, prefix="t")
        rest.add(other)
        rest.resume(rounds.done(), [section.reducer.arrived])
        other.reducer.sums, other.grads = kept, grads
        for _ in range(2):
            for index in range(3):
                other.grads[index] = other.grads.get(index, 0.0) + 1.0
                rest.arrived(0, index)
        rest.send_rest()
        other.reducer.finish()
        return other.totals()

    assert ThreadWorld(2).run(run) == [[6.0] * 3] * 2


@pytest.mark.parametrize("passes", [0, -1, 1.0, True, "2"])
def test_numbers_of_passes_that_do_not(passes):
    with pytest.raises(ValueError, match="backward_passes_per_step must be"):
        check_passes(passes)


# -- weights -------------------------------------------------------------------------------------


@pytest.fixture
def no_weight_is_left():
    yield
    weighting.clear()


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_weights_that_do_not(value):
    with pytest.raises(ValueError, match="a weight must be a number >= 0"):
        weighting.weight(value)


def test_a_weight_stays_until_it_is_cleared(no_weight_is_left):
    assert weighting.announced() is None
    with weighting.weight(3):
        assert weighting.announced() == 3.0
    assert weighting.announced() == 3.0  # the step that comes now needs it
    weighting.check_unchanged(3.0)
    with pytest.raises(ValueError, match=r"zero.weight\(3\) came after .* with no weight"):
        weighting.check_unchanged(None)
    with pytest.raises(KeyError), weighting.weight(4):
        raise KeyError
    assert weighting.announced() is None
    with pytest.raises(ValueError, match=r"no weight came after .* with weight 3"):
        weighting.check_unchanged(3.0)


def test_a_held_weight_is_not_used_up():
    announced = weighting.Announced()
    announced.announce(2.0)
    assert (announced.take(), announced.take()) == (2.0, None)
    announced.announce(2.0, held=True)
    assert (announced.take(), announced.take()) == (2.0, 2.0)
    announced.clear()
    assert announced.take() is None
