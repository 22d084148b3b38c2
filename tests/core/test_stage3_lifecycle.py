"""Units are gathered when needed and freed after: never more than two besides the root."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerohvd.communication.waiting import Timing
from zerohvd.stage3.lifecycle import UnitLifecycle
from zerohvd.stage3.unit import GATHERED, SHARDED, Unit
from zerohvd.testing import ThreadWorld

QUICK = Timing(patience=0.01, short_patience=0.002, limit=30, poll=1e-3, poll_slowly=2e-3)


class Failed(Exception):
    """What a forward pass of the test raises."""


class Memory:
    """One number per rank; its values say which rank published them, and in which step."""

    def __init__(self, collectives, name):
        self.c, self.name = collectives, name
        self.params = [name]
        self.shard = np.zeros(1)
        self.whole = None  # the gathered memory; None: freed
        self.shown = None
        self.pinned = False

    def gather_start(self):
        if self.whole is None:
            self.whole = np.full(self.c.size, np.nan)
        return [self.c.gather_into(self.whole, self.shard, [1] * self.c.size, name=self.name)]

    def show(self):
        self.shown = self.whole

    def hide(self):
        self.shown, self.pinned = None, True

    def free(self):
        self.shown, self.pinned = None, False
        self.free_unused()

    def free_unused(self):
        if self.shown is not self.whole and not self.pinned:
            self.whole = None

    def lend(self, *, keep_own):
        self.shown = self.whole.copy()
        self.pinned = keep_own
        self.free_unused()

    def pin_own(self):
        if self.shown is not self.whole and not self.pinned:
            self.whole, self.pinned = self.shown.copy(), True

    def end_loan(self):
        if self.shown is not self.whole:
            self.whole = self.shown.copy()
            self.pinned = False
            self.show()

    def put(self):
        self.whole = np.full(self.c.size, np.nan)
        self.whole[self.c.rank] = self.shard[0]

    def put_own(self):
        self.shown[self.c.rank] = self.shard[0]

    def make_exact(self):
        pass

    def keep(self):
        self.shard[0] = self.shown[self.c.rank]

    def broadcast(self, root):
        self.shown[:] = self.c.broadcast(self.shown, root)

    def changed(self):
        same = self.shown[self.c.rank] == self.shard[0]
        return None if same else self.name


class Model:
    """One rank's units: the root and `count` others, run as lists of calls say.

    A call is (unit's number, calls inside it, whether it fails after these). A number below zero
    is no call: the module around uses parameters of that unit itself.
    """

    def __init__(self, collectives, count, **options):
        self.c = collectives
        self.units = [Unit(f"u{n}", n) for n in range(count + 1)]
        for unit in self.units:
            unit.parts = [Memory(collectives, unit.name)]
        options = {"timing": QUICK, **options}
        self.cycle = UnitLifecycle(self.units, collectives, "m", **options)
        self.tape = []  # (unit, use, calls inside), in the order of their ends
        self.step = 0
        self.most = 0  # units that were gathered or under way at a time, besides the root
        self.nesting = 0

    def look(self, unit):
        """Check what is seen while a unit runs."""
        values = unit.parts[0].shown
        assert values is not None and values is unit.parts[0].whole
        assert (values == self.step).all(), (unit, values, self.step)
        others = [u for u in self.units[1:] if u.state != SHARDED]
        self.nesting = max(self.nesting, sum(u.depth > 0 for u in others))
        self.most = max(self.most, len(others))

    def use(self, number, use):
        unit = self.units[number]
        if unit.parts[0].shown is None:
            assert self.cycle.borrow(unit)
            assert unit in use.borrowed or unit.depth
        self.look(unit)

    def run(self, call, recorded=True):
        number, inside, fails = call
        unit = self.units[number]
        use = self.cycle.begin_forward(unit, recorded=recorded)
        succeeded = False
        try:
            self.look(unit)
            for inner in inside:
                if inner[0] < 0:
                    self.use(-inner[0], use)
                else:
                    self.run(inner, recorded)
                self.look(unit)
            if fails:
                raise Failed
            succeeded = True
        finally:
            self.cycle.end_forward(unit, use, last_use=not (recorded and succeeded))
        self.tape.append((unit, use))

    def forward(self, calls, recorded=True):
        self.tape = []
        with contextlib.suppress(Failed):
            self.run((0, calls, False), recorded)
            return True
        return False

    def backward(self, again=False):
        for unit, use in reversed(self.tape):
            self.cycle.starts_backward()
            self.cycle.begin_backward(unit, use, again=again)
            for _, around in self.tape:
                if around.start <= use.start and around.stop >= use.stop:
                    for needed in (around.unit, *around.borrowed):
                        self.look(needed)
        self.cycle.end_backward()

    def settle(self):
        self.cycle.settle()
        for unit in self.units:
            assert unit.state == SHARDED and unit.idle
            assert unit.parts[0].whole is None and unit.parts[0].shown is None

    def update(self):
        """A step: every rank's shard changes."""
        self.settle()
        self.step += 1
        for unit in self.units:
            unit.parts[0].shard[0] = self.step

    @property
    def gathers(self):
        return [u.gathers for u in self.units]


def run_ranks(size, fn, *args):
    """Call `fn` on every rank. None leaves while another may still ask what it needs."""

    def live(c):
        result = fn(c, *args)
        c.barrier()
        return result

    return ThreadWorld(size).run(live)


def blocks(*numbers):
    return [(n, [], False) for n in numbers]


def test_a_unit_is_gathered_twice_a_step_and_the_last_two_once():
    def train(c):
        model = Model(c, 5)
        counts = []
        for _ in range(4):
            before = np.array(model.gathers)
            model.forward(blocks(1, 2, 3, 4, 5))
            model.backward()
            model.update()
            counts.append((np.array(model.gathers) - before).tolist())
        return counts, model.most

    for counts, most in run_ranks(3, train):
        assert counts[-1] == [1, 2, 2, 2, 1, 1]
        assert most == 2


def test_without_resharding_every_unit_is_gathered_once_a_step():
    def train(c):
        model = Model(c, 4, reshard_after_forward=False)
        for _ in range(3):
            before = np.array(model.gathers)
            model.forward(blocks(1, 2, 3, 4))
            assert all(u.state == GATHERED for u in model.units)
            model.backward()
            assert not any(u.state == GATHERED for u in model.units)
            model.update()
        return (np.array(model.gathers) - before).tolist()

    assert run_ranks(2, train) == [[1] * 5] * 2


def test_a_forward_pass_alone_leaves_no_unit_gathered():
    def evaluate(c):
        model = Model(c, 3)
        for _ in range(2):
            model.forward(blocks(1, 2, 3), recorded=False)
            assert {u.state for u in model.units} == {SHARDED}
        return model.most

    assert run_ranks(2, evaluate) == [2, 2]


def test_a_graph_of_gradients_keeps_its_units_until_the_step():
    def train(c):
        model = Model(c, 2)
        model.forward(blocks(1, 2))
        model.backward(again=True)
        assert all(u.kept and u.state == GATHERED for u in model.units)
        model.update()
        assert not any(u.kept for u in model.units)

    run_ranks(2, train)


@pytest.mark.parametrize("block", ["forward", "hold"])
def test_a_step_in_the_middle_is_refused(block):
    model = Model(ThreadWorld(1).run(lambda c: c)[0], 1)
    if block == "forward":
        model.cycle.begin_forward(model.units[1])
    else:
        model.cycle.hold([model.units[1]])
    with pytest.raises(RuntimeError, match="'u1' were in use"):
        model.settle()


def test_what_one_rank_has_written_is_published():
    def write(c):
        model = Model(c, 2)
        units = model.cycle.of(["u0", "u2"])
        assert units == [model.units[0], model.units[2]]
        model.cycle.lend(units)
        view = units[1].parts[0].shown
        view[:] = c.rank + 5.0
        model.cycle.publish(units, 1)
        model.cycle.end_loan(units)
        assert (view == 6).all()  # the user's view outlives the loan
        seen = {p: model.cycle.of([p])[0].parts[0].shown.copy() for p in model.cycle.stream("u2")}
        return view.tolist(), seen

    for view, seen in run_ranks(4, write):
        assert view == [6.0] * 4 and seen == {}

    def read(c):
        model = Model(c, 2)
        units = model.units[1:]
        model.cycle.lend(units)
        if c.rank == 2:
            units[1].parts[0].shown[2] = 9.0
        try:
            model.cycle.refuse_writes(units)
        except RuntimeError as error:
            return str(error)

    said = run_ranks(3, read)
    assert "'u2', or one beside it, was written" in said[2]
    assert all("a parameter was written" in text for text in said[:2])


def test_parameters_are_streamed_one_unit_at_a_time():
    def stream(c):
        model = Model(c, 3)
        model.update()
        found = []
        for name in model.cycle.stream({"u1", "u3"}):
            (unit,) = [u for u in model.units if u.state == GATHERED]
            model.look(unit)
            found.append((name, unit.name))
        model.settle()
        return found

    assert run_ranks(2, stream) == [[("u1", "u1"), ("u3", "u3")]] * 2


def test_loading_is_local_and_keeps_this_ranks_part():
    def load(c):
        model = Model(c, 2)
        if c.rank == 1:  # the others do not load
            for unit in model.units[1:]:
                model.cycle.open(unit)
                model.cycle.open(unit)
                unit.parts[0].shown[:] = 7.0
                model.cycle.close(unit)
                assert unit.state == GATHERED
                model.cycle.close(unit)
        model.forward([], recorded=False)
        model.cycle.hold(model.units)
        return model.cycle.loads, model.units[1].parts[0].shown.tolist()

    loads = run_ranks(3, load)
    assert loads == [(n, [0.0, 7.0, 0.0]) for n in (0, 2, 0)]


def test_a_loan_in_the_middle_of_a_pass_leaves_the_pass_its_memory():
    def train(c):
        model = Model(c, 2)
        model.forward(blocks(1, 2))
        model.cycle.lend(model.units)
        model.cycle.end_loan(model.units)
        model.backward()
        model.update()
        return model.gathers

    gathers = run_ranks(2, train)
    assert gathers[0] == gathers[1]


class LateHandle:
    """A collective whose end this rank notices late."""

    def __init__(self, handle):
        self.handle, self.done = handle, handle.done

    def wait(self):
        time.sleep(0.2)
        self.handle.wait()


def test_a_rank_in_its_next_step_gets_no_old_values():
    """It asks for the root while another one is at the end of `settle`."""

    def train(c):
        start = c.allreduce_start
        model = Model(c, 1)
        if c.rank == 1:
            c.allreduce_start = lambda *args, **kw: LateHandle(start(*args, **kw))
        time.sleep(0 if c.rank else 0.05)  # rank 1 asks what the others need
        model.update()
        model.forward(blocks(1))
        model.backward()
        model.settle()

    run_ranks(2, train)


# -- many ranks, each with a pass of its own ------------------------------------------------------


def calls(count, nested, lowest=1):
    """Lists of calls of units: repeated, skipped, in each other, failing."""
    numbers = st.integers(lowest, count).filter(bool)
    leaf = st.tuples(numbers, st.just([]), st.just(False))
    failing = st.tuples(numbers, st.just([]), st.sampled_from([False, False, False, True]))
    if not nested:
        return st.lists(failing, max_size=7)
    inner = st.lists(leaf, max_size=3)
    call = st.tuples(numbers, st.one_of(st.just([]), inner), st.sampled_from([False] * 4 + [True]))
    return st.lists(call, max_size=5)


def train(c, passes, reshard):
    """Run the passes of this rank; return (gathers, most units at a time, nesting)."""
    model = Model(c, 4, reshard_after_forward=reshard)
    model.update()
    for per_rank in passes:
        if model.forward(per_rank[c.rank % len(per_rank)]):
            model.backward()
        if model.step % 2:
            model.forward(per_rank[0], recorded=False)
        model.update()
    return model.gathers, model.most, model.nesting


def passes_of(calls_of_rank):
    """Per step the calls of up to three kinds of ranks."""
    return st.lists(st.lists(calls_of_rank, min_size=1, max_size=3), min_size=1, max_size=3)


EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@EXAMPLES
@given(
    size=st.sampled_from([2, 3, 5, 16]),
    passes=passes_of(calls(4, nested=False)),
)
def test_ranks_with_passes_of_their_own_end_alike(size, passes):
    found = run_ranks(size, train, passes, True)
    assert len({tuple(gathers) for gathers, _, _ in found}) == 1
    assert max(most for _, most, _ in found) <= 2


@EXAMPLES
@given(
    size=st.sampled_from([2, 4, 7]),
    reshard=st.booleans(),
    passes=passes_of(calls(4, nested=True)),
)
def test_units_in_each_other_count_as_one(size, reshard, passes):
    found = run_ranks(size, train, passes, reshard)
    assert len({tuple(gathers) for gathers, _, _ in found}) == 1
    for _, most, nesting in found:
        assert not reshard or most <= max(1, nesting) + 1


def test_what_a_pass_uses_itself_stays_until_its_end_and_comes_back_for_its_backward_pass():
    def learn(c):
        model = Model(c, 4)
        assert not model.cycle.borrow(model.units[1])  # outside of any pass
        for recorded in (True, True, False):
            model.forward([*blocks(1, 2), (3, [(-4, [], False)], False), *blocks(-1)], recorded)
            lent = [u for u in model.units if any(use.under_way for use in u.borrowers)]
            assert not lent
            if recorded:
                model.backward()
            assert {u.state for u in model.units} == {SHARDED}
            model.update()
        return model.gathers

    gathers = run_ranks(3, learn)
    assert len({tuple(g) for g in gathers}) == 1


@EXAMPLES
@given(
    size=st.sampled_from([2, 3, 5]),
    reshard=st.booleans(),
    passes=passes_of(calls(4, nested=True, lowest=-4)),
)
def test_passes_may_use_parameters_of_any_unit(size, reshard, passes):
    found = run_ranks(size, train, passes, reshard)
    assert len({tuple(gathers) for gathers, _, _ in found}) == 1


def test_64_ranks_with_experts_of_their_own():
    passes = [[blocks(1, 2, 4), blocks(1, 3, 4), blocks(1, 4)]] * 3
    found = run_ranks(64, train, passes, True)
    assert len({tuple(gathers) for gathers, _, _ in found}) == 1
    assert {most for _, most, _ in found} == {2}
    assert threading.active_count() < 64
