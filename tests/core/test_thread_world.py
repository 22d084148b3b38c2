"""What would hang a real job raises in a ThreadWorld, and says which rank and which call."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from zerohvd.testing import MismatchedCallsError, ReleasedError, ThreadWorld


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("size", [1, 2, 128])
def test_results_come_in_rank_order(size):
    found = ThreadWorld(size).run(lambda c, plus: (c.rank + plus, c.size), 10)
    assert found == [(rank + 10, size) for rank in range(size)]


def test_a_hundred_and_twenty_eight_ranks_can_talk():
    def steps(c):
        for _ in range(3):
            total = c.allreduce(np.ones(256, np.float32))
        return float(total.sum())

    assert ThreadWorld(128).run(steps) == [256 * 128.0] * 128


def test_a_world_can_run_many_times_even_after_a_failure():
    world = ThreadWorld(3)
    with pytest.raises(ZeroDivisionError):
        world.run(lambda c: 1 // c.rank)
    assert world.run(lambda c: int(c.allreduce(np.ones(1))[0])) == [3, 3, 3]


def test_when_a_rank_fails_the_others_are_released_at_once():
    def fail(c):
        if c.rank == 2:
            raise KeyError("lost")
        c.barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="lost"):
        ThreadWorld(4, timeout=60).run(fail)
    assert time.monotonic() - start < 5


def test_the_lowest_failing_rank_is_reported_and_the_others_noted():
    def fail(c):
        if c.rank:
            raise ValueError(f"no {c.rank}")
        c.barrier()

    with pytest.raises(ValueError, match="no 1") as caught:
        ThreadWorld(3).run(fail)
    if sys.version_info >= (3, 11):
        notes = "\n".join(caught.value.__notes__)
        assert "rank 1" in notes
        assert "rank 2 raised ValueError: no 2" in notes


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda c: c.allreduce(np.ones(3), name="y"), ["allreduce 'x'", "allreduce 'y'"]),
        (lambda c: c.allgather(np.ones(3), name="x"), ["allreduce 'x'", "allgather 'x'"]),
        (lambda c: c.allreduce(np.ones(4), name="x"), ["(3,)", "(4,)"]),
        (lambda c: c.allreduce(np.ones(3, np.float32), name="x"), ["float64", "float32"]),
        (lambda c: c.allreduce(np.ones(3), "max", name="x"), ["sum of", "max of"]),
    ],
    ids=["name", "operation", "shape", "dtype", "op"],
)
def test_different_calls_are_an_error_on_every_rank_that_names_both(other, words):
    def call(c):
        try:
            return other(c) if c.rank == 1 else c.allreduce(np.ones(3), name="x")
        except MismatchedCallsError as error:
            return str(error)

    messages = ThreadWorld(3).run(call)
    assert len(set(messages)) == 1
    assert all(word in messages[0] for word in [*words, "ranks [0, 2]", "ranks [1]"])


def test_a_rank_that_never_comes_is_named_with_the_call_the_others_wait_in():
    released = threading.Event()

    def call(c):
        if c.rank == 1:
            released.wait(5)
            return
        try:
            c.allgather(np.ones(3), name="weights")
        finally:
            released.set()

    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not come to allgather 'weights'.*"):
        ThreadWorld(3, timeout=0.3).run(call)


def test_nobody_waits_for_a_rank_that_has_returned():
    start = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r"did not come to allreduce .*ranks \[1\] have returned"
    ):
        ThreadWorld(2, timeout=60).run(lambda c: c.barrier() if c.rank == 0 else None)
    assert time.monotonic() - start < 5


def test_a_released_rank_learns_why():
    def call(c):
        if c.rank == 1:
            raise ValueError("out of memory")
        try:
            c.barrier()
        except ReleasedError as error:
            return str(error)

    reasons = []
    with pytest.raises(ValueError, match="out of memory"):
        ThreadWorld(2).run(lambda c: reasons.append(call(c)))
    assert reasons == ["rank 1 failed with ValueError: out of memory"]


def test_a_world_needs_a_rank():
    with pytest.raises(ValueError, match="size must be at least 1"):
        ThreadWorld(0)
