"""Metric states of all ranks give the results of one process on all samples."""

from __future__ import annotations

import numpy as np
import pytest

from zerohvd.communication.metrics import Snapshot, add_up
from zerohvd.testing import ThreadWorld


def mean_of(values, name="loss"):
    """A rank's mean metric: total and count."""
    state = [np.float32(sum(values)), np.float32(len(values))]
    result = float(np.mean(values)) if values else 0.0
    return Snapshot([np.asarray(s) for s in state], ["sum", "sum"], {name: result}, len(values))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_states_add_up_whatever_a_rank_has_seen(size):
    seen = [[float(r)] * r for r in range(size)]

    def rank(ranks):
        here = mean_of(seen[ranks.rank])
        return add_up(here, {**here.results, "extra": ranks.rank}, ranks, "test")

    every = [v for values in seen for v in values]
    for joint in ThreadWorld(size).run(rank):
        assert joint.metrics == {"loss"}
        assert [float(s) for s in joint.state] == [sum(every), len(every)]
        assert joint.state[0].dtype == np.float32
        if every:  # means are weighted by samples
            assert joint.means["extra"] == pytest.approx(np.mean(every))


def test_other_aggregations():
    def rank(ranks):
        state = [np.array([2.0 + ranks.rank]), np.array([5 + ranks.rank])]
        here = Snapshot(state, ["mean", "only_first_replica"], {}, 0.0)
        return add_up(here, {"a": ranks.rank}, ranks, "test")

    for joint in ThreadWorld(3).run(rank):
        assert [float(s[0]) for s in joint.state] == [3.0, 5.0]
        assert joint.means == {"a": 1.0} and joint.metrics == set()


def test_states_that_are_no_sums_are_combined_as_they_say():
    how = ["max", "min", "product", "last", "sum"]

    def rank(ranks):
        state = [np.array([[2.0 + ranks.rank, -1.0]], np.float32) for _ in how]
        return add_up(Snapshot(state, how, {}, 0.0), {}, ranks, "test").state

    for found in ThreadWorld(3).run(rank):
        assert [s.shape for s in found] == [(1, 2)] * 5
        expected = [[4, -1], [2, -1], [24, -1], [4, -1], [9, -3]]
        assert [s[0].tolist() for s in found] == expected


def test_ranks_with_other_metrics_raise_on_all_ranks():
    def rank(ranks):
        here = mean_of([1.0], "loss" if ranks.rank else "accuracy")
        with pytest.raises(ValueError, match="Compile the same metrics on all ranks"):
            add_up(here, here.results, ranks, "test")

    ThreadWorld(2).run(rank)


def test_names_that_a_framework_has_numbered_are_the_same():
    def rank(ranks):
        here = mean_of([1.0], f"auc_{ranks.rank}")
        return add_up(here, here.results, ranks, "test")

    for r, joint in enumerate(ThreadWorld(2).run(rank)):
        assert joint.metrics == {f"auc_{r}"}
