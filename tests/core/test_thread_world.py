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


# -- collectives that are found by name -----------------------------------------------------------


def test_ranks_may_start_named_collectives_in_any_order():
    def steps(c):
        names = [f"n{i}" for i in range(8)]
        arrays = {name: np.full(3, float(c.rank)) for name in names}
        order = names if c.rank % 2 else names[::-1]
        handles = [c.allreduce_start(arrays[name], name=name) for name in order]
        for handle in reversed(handles):
            handle.wait()
            handle.wait()  # again: nothing happens
        return {float(x) for a in arrays.values() for x in a}

    assert ThreadWorld(128).run(steps) == [{sum(range(128))}] * 128


def test_a_named_gather_fills_its_output():
    def gather(c):
        out, lengths = np.zeros(3), [1, 2]
        own = np.full(lengths[c.rank], 1.0 + c.rank)
        c.gather_into(out, own, lengths, name="g").wait()
        return out.tolist()

    assert ThreadWorld(2).run(gather) == [[1.0, 2.0, 2.0]] * 2


def test_a_handle_is_done_when_all_ranks_have_started_it_and_the_delay_is_over():
    def late(c):
        if c.rank:
            time.sleep(0.1)
        start = time.monotonic()
        handle = c.allreduce_start(np.ones(1), "max", name="slow")
        while not handle.done():
            time.sleep(1e-3)
        return time.monotonic() - start

    early, last = ThreadWorld(2, delay=lambda name: 0.2 if name == "slow" else 0).run(late)
    assert early >= 0.28 and 0.2 <= last < 0.29


def test_one_name_twice_in_flight_is_an_error():
    def twice(c):
        if c.rank == 0:
            c.allreduce_start(np.ones(1), name="x")
            with pytest.raises(ValueError, match="rank 0 has 'x' in flight already"):
                c.allreduce_start(np.ones(1), name="x")
        c.barrier()

    ThreadWorld(2).run(twice)


def test_a_name_may_be_used_again_before_everyone_has_waited():
    def again(c):
        first, second = np.ones(1), np.full(1, 2.0)
        handle = c.allreduce_start(first, name="x")
        c.barrier()
        c.allreduce_start(second, name="x").wait()
        handle.wait()
        return first[0], second[0]

    assert ThreadWorld(3).run(again) == [(3.0, 6.0)] * 3


def test_different_collectives_under_one_name():
    def differ(c):
        c.allreduce_start(np.ones(1 + c.rank), name="x").wait()

    with pytest.raises(MismatchedCallsError, match=r"sum of float64 \(2,\)"):
        ThreadWorld(2).run(differ)


def test_a_rank_that_returns_without_starting_a_named_collective():
    def leave(c):
        if c.rank:
            c.allreduce_start(np.ones(1), name="x").wait()

    with pytest.raises(TimeoutError, match=r"ranks \[0\] did not come to allreduce 'x'"):
        ThreadWorld(2).run(leave)
