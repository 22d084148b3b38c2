"""The record of what a step moves, with variables that a later run of a traced step writes to."""

from __future__ import annotations

from zerohvd.communication.traffic import StepTraffic


class Variable:
    def __init__(self, value=-1):
        self.value = value

    def assign(self, value):
        self.value = int(value)

    def __int__(self):
        return self.value


def names(traffic):
    return [record.name for record in traffic.log().records]


def test_a_branch_counts_in_the_steps_that_took_it():
    step, marks = Variable(1), {}
    traffic = StepTraffic(2, step, marks, Variable)
    traffic.add("always", "allreduce", "float32", 4, 16)
    with traffic.branch("sometimes"):
        traffic.add("inside", "allgather", "float32", 4, 16, 8)
    assert names(traffic) == ["always", "inside"]
    step.assign(2)  # the next step runs the traced graph, and takes another branch
    assert names(traffic) == ["always"]
    marks["sometimes"].assign(step)
    assert names(traffic) == ["always", "inside"]


def test_rows_are_counted_when_the_step_has_run():
    marks = {}
    traffic = StepTraffic(3, Variable(1), marks, Variable)
    traffic.add_gathered_rows("rows", 5, "float16", 4, 2)
    record = traffic.log().records[0]
    assert (record.elements, record.nbytes, record.moved) == (20, 40, 80)
    marks["rows/rows"].assign(1)
    assert traffic.log().records[0].moved == 16


def test_a_branch_inside_a_branch_leaves_the_outer_one_open():
    step = Variable(1)
    traffic = StepTraffic(2, step, {}, Variable)
    with traffic.branch("outer"):
        with traffic.branch("inner"):
            traffic.add("a", "allreduce", "float32", 1, 4)
        traffic.add("b", "allreduce", "float32", 1, 4)
    assert sorted(names(traffic)) == ["a", "b"]
