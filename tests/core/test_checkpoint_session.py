"""A save and a load by any two numbers of ranks, with a framework made of numpy arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerohvd.checkpoint import CheckpointError, Entry, TensorInfo, session
from zerohvd.checkpoint.matching import (
    BUFFER,
    LOCAL_GRAD,
    PARAM,
    LoadPlan,
    Matching,
    Names,
    Slot,
    own_name,
    state_span,
)
from zerohvd.checkpoint.reader import as_numpy
from zerohvd.layout import Span
from zerohvd.testing import ThreadWorld

SHAPE = (3, 7)
NUMEL = 21


class NumpyStaging:
    def allocate(self, length, dtype, *, zeros):
        return np.zeros(length, dtype) if zeros else np.full(length, 99, dtype)

    def destination(self, memory, stored, factor):
        if factor is None and memory.dtype == stored:
            return memory.view(np.uint8).data

        def take(start, block):
            values = np.frombuffer(block, stored)
            into = memory[start : start + values.size]
            into[:] = values if factor is None else into + factor * values

        return take


class NumpyTraining:
    """A parameter `w` in shards, statistics `mean` of each rank, and accumulated gradients."""

    framework = "numpy"

    def __init__(self, ranks, fill=0.0):
        self.ranks = ranks
        start, stop = (NUMEL * r // ranks.size for r in (ranks.rank, ranks.rank + 1))
        self.span = Span(start, stop)
        self.shard = np.arange(start, stop, dtype=np.float32) + np.float32(fill)
        self.mean = np.full(2, fill + (ranks.rank % 2), np.float32)
        self.grad = np.full(NUMEL, fill + ranks.rank, np.float32)
        self.replicated = False
        self.staging = NumpyStaging()

    def meet(self, call):
        return self.ranks

    def snapshot(self):
        return self

    target = snapshot

    def to_array(self, value):
        return None

    def from_array(self, info, data):
        return as_numpy(info, data)

    # -- Snapshot ---------------------------------------------------------------------------------

    def pieces(self):
        yield Entry(PARAM, "w", "float32", SHAPE, self.span, self.shard)

    def copies(self):
        return []

    def variants(self):
        yield Entry(BUFFER, "mean", "float32", (2,), Span(0, 2), self.mean)

    def own(self, rank):
        name = own_name("w", rank)
        yield Entry(LOCAL_GRAD, name, "float32", SHAPE, Span(0, NUMEL), self.grad)

    def values(self, rank):
        return {}

    config = given = state = lambda self: {}

    def generators(self):
        return {"rank": self.ranks.rank}

    def counted_steps(self):
        return 5

    # -- Target -----------------------------------------------------------------------------------

    def openers(self):
        return {}

    def names(self, stored):
        return Names(["w", "mean"])

    def plan(self, plan, stored, *, strict):
        def into(array):
            return lambda memory: np.copyto(array, memory)

        plan.weights([Slot("w", SHAPE, self.span, "float32", into(self.shard))])
        plan.weights([Slot("mean", (2,), Span(0, 2), "float32", into(self.mean), per_rank=True)])
        slot = Slot("w", SHAPE, Span(0, NUMEL), "float32", into(self.grad))
        plan.fill(slot, plan.matching.local_grads("w"))
        if self.ranks.rank == getattr(self, "fails_on", None):
            raise ValueError("this rank cannot")

    def apply(self, plan, stored):
        plan.apply()

    def changes(self, stored):
        return []

    def prepare_generators(self, stored):
        rank = stored["rank"]
        return lambda: setattr(self, "generator", rank)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 2), (3, 1), (5, 2), (2, 16)])
def test_any_number_of_ranks_loads_what_another_has_saved(tmp_path, before, after):
    def save(ranks):
        session.save(tmp_path / "a", NumpyTraining(ranks, 10.0), session.Notes({"epoch": 1}))

    def load(ranks):
        training = NumpyTraining(ranks)
        assert session.load(tmp_path / "a", training) == {"epoch": 1}
        return training

    ThreadWorld(before).run(save)
    loaded = ThreadWorld(after).run(load)
    whole = np.concatenate([t.shard for t in loaded])
    np.testing.assert_array_equal(whole, np.arange(NUMEL) + 10.0)
    # The mean of the accumulated gradients over the ranks is what it was.
    saved = np.mean([10.0 + r for r in range(before)])
    np.testing.assert_allclose(np.mean([t.grad for t in loaded], axis=0), np.full(NUMEL, saved))
    for rank, training in enumerate(loaded):
        own = rank % 2 if before == after else 0
        np.testing.assert_array_equal(training.mean, np.full(2, 10.0 + own))
        assert getattr(training, "generator", None) == (rank if before == after else None)


def test_an_error_on_one_rank_is_raised_on_all_and_nothing_is_loaded(tmp_path):
    ThreadWorld(2).run(
        lambda ranks: session.save(tmp_path / "a", NumpyTraining(ranks, 10.0), session.Notes())
    )

    def load(ranks):
        training = NumpyTraining(ranks)
        training.fails_on = 1
        with pytest.raises(ValueError, match=r"rank 1: .*: this rank cannot"):
            session.load(tmp_path / "a", training)
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            session.load(tmp_path / "b", training)
        return training.shard

    np.testing.assert_array_equal(np.concatenate(ThreadWorld(2).run(load)), np.arange(NUMEL))


# -- matching --------------------------------------------------------------------------------------


def infos(*keys, dtype="float32", shape=SHAPE):
    return {key: TensorInfo(key, dtype, shape, ()) for key in keys}


def matching(tensors, names, *, aliases=None, rank=0, size=1, saved_size=1):
    return Matching(
        tensors, names, aliases=aliases or {}, rank=rank, size=size, saved_size=saved_size
    )


def slot(name="w", dtype="float32", shape=SHAPE):
    return Slot(name, shape, Span(0, NUMEL), dtype, print)


def test_tied_tensors_are_found_under_any_of_their_names():
    tied = Names(["embed"], aliases={"head": "embed"})
    assert matching(infos("param/head"), tied).weight(slot("embed")).name == "head"
    matching(infos("param/head"), tied).check_names()
    untied = matching(infos("param/embed"), Names(["embed", "head"]), aliases={"head": "embed"})
    untied.check_names()
    assert untied.weight(slot("head")).name == "embed"


def test_state_of_tied_tensors_is_found_under_any_of_their_names():
    """Tensors and counters alike: Adam with momenta but without its step fails."""
    tied = matching(infos("state.exp_avg/head"), Names(["embed"], aliases={"head": "embed"}))
    assert list(tied.states("embed")) == ["exp_avg"]
    assert tied.by_name({"head": {"step": 3}}, "embed") == {"step": 3}
    assert tied.by_name({"other": {"step": 3}}, "embed") == {}


def test_what_is_missing_and_unknown_is_named():
    with pytest.raises(ValueError, match=r"model has 1 .*'b'.* and the checkpoint has 1 .*'c'"):
        matching(infos("param/a", "param/c"), Names(["a", "b"])).check_names()
    plain = matching({}, Names(["seed"], optional=frozenset({"seed"})), saved_size=0)
    plain.check_names()


def test_the_master_is_taken_where_the_parameter_has_another_dtype():
    tensors = {**infos("param/w", dtype="bfloat16"), **infos("master/w")}
    found = matching(tensors, Names(["w"]))
    assert found.weight(slot(dtype="float32")).kind == "master"
    assert found.weight(slot(dtype="bfloat16")).kind == "param"
    assert found.updated_dtype("w") == "float32"


def test_shapes_are_compared():
    with pytest.raises(ValueError, match=r"'w' has shape \(3, 7\) in the checkpoint, but \(7, 3\)"):
        matching(infos("param/w"), Names(["w"])).weight(slot(shape=(7, 3)))
    info = TensorInfo("state.row/w", "float32", (3,), ())
    assert state_span(info, "w", SHAPE, Span(0, NUMEL)) == (0, 3)
    with pytest.raises(ValueError, match='partition="parameter"'):
        state_span(info, "w", SHAPE, Span(0, 5))


@given(saved=st.integers(1, 128), size=st.integers(1, 128), average=st.booleans())
def test_every_accumulated_gradient_is_taken_over_by_one_rank(saved, size, average):
    tensors = infos(*(f"grad/{own_name('w', r)}" for r in range(saved)))
    taken = []
    for rank in range(size):
        found = matching(tensors, Names(["w"]), rank=rank, size=size, saved_size=saved)
        taken += found.local_grads("w", average=average)
    assert sorted(info.key for info, _ in taken) == sorted(tensors)
    # Averaged over the new ranks, each counts as it did among the old ones.
    weight = 1 / size if average else 1.0
    for _, factor in taken:
        assert factor * weight == pytest.approx(1 / saved if average else 1.0)


def test_parts_are_added_up_and_groups_applied_one_by_one():
    plan = LoadPlan(matching(infos("a/w", "b/w"), Names(["w"])), NumpyStaging())
    done = []
    plan.then(lambda: done.append("later"), group=1)
    plan.then(lambda: done.append("first"))
    memory = plan.fetch([(t, 0.5) for t in plan.matching.tensors.values()], Span(2, 4), "float32")
    for want in plan.wants:
        want.into(0, np.array([2, 4], np.float32).data.cast("B"))
    np.testing.assert_array_equal(memory, [2, 4])
    plan.apply()
    assert done == ["first"]
    plan.apply(1)
    assert done == ["first", "later"]
