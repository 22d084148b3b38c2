"""Every bucket of every round leaves once on every rank, in one order, and the sums are right."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerohvd.communication import weighting
from zerohvd.communication.collectives import Handle
from zerohvd.communication.rendezvous import Rendezvous
from zerohvd.communication.rounds import Rounds, check_passes
from zerohvd.errors import DisagreementError
from zerohvd.layout import ParamSpec, build_layout
from zerohvd.schedule import Schedule
from zerohvd.testing import ThreadWorld
from zerohvd.training.in_flight import InFlight
from zerohvd.training.step import GradientStep, MustAgree

IN_FLIGHT = 2


class FakePending(NamedTuple):
    bucket: int
    handle: Handle
    values: np.ndarray


class FakeReducer(InFlight):
    """Sums whole buckets with allreduces; notes the order in which they leave."""

    def __init__(self, section):
        super().__init__(IN_FLIGHT)
        self._section = section
        self.weight = None
        self.sent = []  # over all steps
        self.begin_step()

    def begin_step(self):
        assert not self.pending
        self.arrived = set()
        layout = self._section.layout
        self._taken = np.zeros(len(layout.params))
        self.sums = [np.zeros(len(b.slots)) for b in layout.buckets]

    def take(self, index):
        self.arrived.add(index)
        self._taken[index] += self._section.grads.pop(index)

    def send(self, b):
        self.finish_earlier(b)
        members = [s.param for s in self._section.layout.buckets[b].slots]
        values = self._taken[members] * (1.0 if self.weight is None else self.weight)
        self._taken[members] = 0.0
        self.sent.append(b)
        name = f"{self._section.name}/b{b}"
        handle = self._section.collectives.allreduce_start(values, name=name)
        self.pending.append(FakePending(b, handle, values))

    def complete(self, pending):
        pending.handle.wait()
        self.sums[pending.bucket] += pending.values

    def drop_full(self):
        self._section.grads.clear()

    def release(self):
        pass


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
        self.buckets = range(len(self.layout.buckets))
        self.reducer = FakeReducer(self)

    def frozen(self):
        return self.off

    def with_gradient(self):
        return sorted(self.grads)

    def set_piece_grads(self, buckets):
        self.result = self.totals()

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
        rounds.pause(rounds.begun())
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


def test_a_pause_where_a_rank_has_run_fewer_passes():
    """It sends zeros for the others, which would wait for it."""

    def run(c):
        section = FakeSection(c, "s", 3)
        rounds = Rounds(c, stage=2, passes=3, prefix="t")
        rounds.add(section)
        for _ in range(2 - c.rank):
            for index in range(3):
                section.grads[index] = 1.0
                rounds.arrived(0, index)
        begun = rounds.begun()
        rounds.pause(2)
        return begun, rounds.done(), section.totals()

    assert ThreadWorld(2).run(run) == [(2, 2, [3.0] * 3), (1, 2, [3.0] * 3)]


@pytest.mark.parametrize("passes", [0, -1, 1.0, True, "2"])
def test_numbers_of_passes_that_do_not(passes):
    with pytest.raises(ValueError, match="backward_passes_per_step must be"):
        check_passes(passes)


# -- in flight -----------------------------------------------------------------------------------


class FakeHandle:
    def __init__(self, is_done=False):
        self.is_done, self.waited = is_done, 0

    def done(self):
        return self.is_done

    def wait(self):
        self.waited += 1


class Queue(InFlight):
    def __init__(self, *buckets):
        super().__init__(2)
        self.pending.extend(FakePending(b, FakeHandle(), None) for b in buckets)
        self.completed = []

    def complete(self, pending):
        pending.handle.wait()
        self.completed.append(pending.bucket)


def test_waiting_inside_a_backward_pass_ends_with_the_patience():
    queue = Queue(4, 7)
    assert not queue.has_room(9, 0.01) and not queue.settle(0.01)
    assert queue.completed == []
    queue.pending[0].handle.is_done = True
    assert queue.has_room(9, 0.01)
    assert not queue.has_room(7, 0.01)  # one name must not be in flight twice
    assert queue.completed == [4]
    queue.pending[0].handle.is_done = True
    assert queue.settle(0.01) and queue.completed == [4, 7]


def test_buckets_are_completed_in_the_order_in_which_they_left():
    queue = Queue(0, 1, 2, 3)
    queue.pending[1].handle.is_done = True
    queue.reap()
    assert queue.completed == []  # the first one is not done
    queue.finish(1)
    assert queue.completed == [0, 1]
    queue.finish_earlier(5)
    assert queue.completed == [0, 1]
    queue.finish_earlier(2)
    queue.finish()
    assert queue.completed == [0, 1, 2, 3]


# -- steps ---------------------------------------------------------------------------------------


class FakeParam:
    requires_grad = True


class FakeInner:
    def __init__(self, lr):
        self.param_groups = [{"lr": lr}]


class Step(GradientStep):
    def __init__(self, c, lr=0.1, passes=1, stage=2):
        agreed = MustAgree([[FakeParam()] * 5], FakeInner(lr), None)
        rounds = Rounds(c, stage=stage, passes=passes, prefix="t")
        super().__init__(
            c, Rendezvous(c, "t/agree", None), agreed, rounds=rounds, prefix="t", average=True
        )
        self.section = FakeSection(c, "s", 5)
        rounds.add(self.section)
        self.sections.append(self.section)

    def scale_sums(self, factor):
        self.scaled = factor

    def backward(self, params):
        for index in params:
            self.section.grads[index] = self.section.grads.get(index, 0.0) + 1.0
            self.arrived(0, index)


@pytest.mark.parametrize("size", [1, 2, 5, 32])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_reduces_what_all_ranks_have_computed(size, stage):
    def train(c):
        step = Step(c, stage=stage)
        results = []
        for _ in range(3):
            with step.no_sync():
                step.backward([4, 1])
            assert not step.begun
            step.backward(range(c.rank % 5))  # one rank has no batch at all
            step.send_rest()
            step.await_reduced()
            assert step.begun and step.synchronized
            results.append(step.section.result)
            with pytest.raises(RuntimeError, match="more than backward_passes_per_step"):
                step.arrived(0, 0)
            step.end()
            assert not step.begun and not step.synchronized
        norm = step.joint_norm([3.0, 4.0], 2.0, replicated=False)
        largest = step.joint_norm([float(c.rank)], float("inf"), replicated=False)
        return results, norm, largest, step.joint_norm([3.0, 4.0], 2.0, replicated=True)

    wanted = [float(sum(1 for r in range(size) if i < r % 5)) for i in range(5)]
    for index in (4, 1):
        wanted[index] += size
    for results, norm, largest, alone in ThreadWorld(size).run(train):
        assert results == [wanted] * 3
        assert norm == pytest.approx(5.0 * size**0.5) and alone == 5.0 and largest == size - 1


def test_weighted_sums_are_divided_by_the_weight_of_all_ranks(no_weight_is_left):
    def train(c):
        step = Step(c)
        weighting.weight(4)  # of all ranks: they are threads of one process
        step.send_rest()
        step.await_reduced()
        return step.scaled

    assert ThreadWorld(3).run(train) == [3 / 12] * 3


def test_a_step_in_which_no_rank_has_a_sample_is_refused(no_weight_is_left):
    def train(c):
        step = Step(c)
        weighting.weight(0)
        step.send_rest()
        with pytest.raises(ValueError, match="every rank gave weight 0"):
            step.await_reduced()
        return True

    assert all(ThreadWorld(3).run(train))


def test_a_weight_that_comes_late_is_refused(no_weight_is_left):
    def train(c):
        step = Step(c)
        step.backward([4])
        with pytest.raises(ValueError, match=r"step\(weight=2\) came after gradients had left"):
            step.announce(2)
        step.send_rest()
        step.await_reduced()
        return True

    assert all(ThreadWorld(2).run(train))


def test_ranks_with_other_learning_rates_are_told_so():
    def train(c):
        step = Step(c, lr=0.1 if c.rank else 0.2)
        step.backward(range(5))
        with pytest.raises(DisagreementError):
            step.send_rest()
        return True

    assert all(ThreadWorld(3).run(train))


# -- weights -------------------------------------------------------------------------------------


@pytest.fixture
def no_weight_is_left():
    yield
    weighting.clear()


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_weights_that_do_not(value):
    with pytest.raises(ValueError, match="a weight must be a number >= 0"):
        weighting.weight(value)


def test_a_weight_counts_for_one_step_of_each_optimizer(no_weight_is_left):
    one, two = weighting.StepWeights(), weighting.StepWeights()
    with weighting.weight(3):
        assert one.begin() == 3.0
    assert one.begin() == 3.0 and two.begin() == 3.0
    one.end()
    assert one.value is None and two.value == 3.0
    assert one.begin() is None  # a second step
    assert weighting.StepWeights().begin() is None  # an optimizer that is made now


def test_a_step_that_has_not_begun_uses_up_its_weight(no_weight_is_left):
    weights = weighting.StepWeights()
    weighting.weight(3)
    weights.end()
    assert weights.begin() is None


def test_a_weight_of_one_optimizer_alone(no_weight_is_left):
    one, two = weighting.StepWeights(), weighting.StepWeights()
    one.give(2.0)
    assert one.begin() == 2.0 and two.begin() is None


def test_a_weight_that_changes_after_gradients_have_left(no_weight_is_left):
    weights = weighting.StepWeights()
    assert weights.begin() is None
    weights.check_unchanged()
    weighting.weight(3)
    with pytest.raises(ValueError, match=r"zero.weight\(3\) came after .* with no weight"):
        weights.check_unchanged()
    weights.end()
    weighting.weight(3)
    weights.begin()
    weighting.weight(3)
    weights.check_unchanged()
    weighting.weight(4)
    with pytest.raises(ValueError, match=r"zero.weight\(4\) came after .* with weight 3"):
        weights.check_unchanged()


def test_a_weight_of_a_pass_that_failed_is_forgotten(no_weight_is_left):
    weights = weighting.StepWeights()
    with pytest.raises(KeyError), weighting.weight(4):
        raise KeyError
    assert weights.begin() is None


def test_a_held_weight_is_not_used_up():
    announced = weighting.Announced()
    announced.announce(2.0)
    assert (announced.take(), announced.take()) == (2.0, None)
    announced.announce(2.0, held=True)
    assert (announced.take(), announced.take()) == (2.0, 2.0)
    announced.clear()
    assert announced.take() is None


def test_a_weight_holds_inside_what_was_wrapped_for_it():
    announced, seen = weighting.Announced(), []

    def run(in_loss):
        seen.append((announced.take(), announced.may_enter_loss()))

    step = announced.holding(run, in_loss=lambda in_loss: in_loss)
    step(True)
    for in_loss in (True, False):
        announced.announce(3.0)
        step(in_loss)
    step(True)
    assert seen == [(None, False), (3.0, True), (3.0, False), (None, False)]
    with announced.during(2.0):
        announced.put_into_loss(seen)
        assert announced.is_in_loss(seen) and not announced.is_in_loss(seen)
        announced.put_into_loss(seen)
    assert not announced.may_enter_loss() and not announced.is_in_loss(seen)
