"""The limit of all waits: where it comes from, what it counts, what is said at its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from zerohvd import limits
from zerohvd.errors import WaitTimeoutError, ZeroError


def test_the_limit_is_minutes_unless_the_environment_says_otherwise():
    assert limits.seconds({}) == 300
    assert limits.seconds({"ZEROHVD_TIMEOUT": "7.5"}) == 7.5
    assert limits.seconds({"ZEROHVD_GATHER_TIMEOUT": "8"}) == 8  # the old name
    assert limits.seconds({"ZEROHVD_GATHER_TIMEOUT": "8", "ZEROHVD_TIMEOUT": "9"}) == 9
    assert limits.seconds({"ZEROHVD_GATHER_TIMEOUT": "8", "ZEROHVD_TIMEOUT": ""}) == 8


@pytest.mark.parametrize("text", ["0", "-1", "five", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=f"ZEROHVD_TIMEOUT must be .* got '{text}'"):
        limits.seconds({"ZEROHVD_TIMEOUT": text})


def test_a_wait_ends_when_it_is_done_or_late(monkeypatch):
    monkeypatch.setenv("ZEROHVD_TIMEOUT", "0.3")
    start = time.monotonic()
    limits.wait(lambda: time.monotonic() - start > 0.1, lambda waited: AssertionError())
    assert 0.1 <= time.monotonic() - start < 0.3
    text = r"rank 3 has waited 0 s for rank 5: a bucket\."
    with pytest.raises(WaitTimeoutError, match=text) as e:
        limits.wait(lambda: False, lambda waited: limits.timed_out(3, [3, 5], "a bucket", waited))
    assert isinstance(e.value, TimeoutError)
    assert isinstance(e.value, ZeroError)


def test_time_in_which_the_process_was_stopped_does_not_count():
    code = (
        "from zerohvd import limits\n"
        "print('waits', flush=True)\n"
        "limits.wait(lambda: False, lambda waited: SystemExit('late'))"
    )
    env = {**os.environ, "ZEROHVD_TIMEOUT": "3"}
    waiting = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    try:
        assert waiting.stdout is not None
        waiting.stdout.readline()
        start = time.monotonic()
        waiting.send_signal(signal.SIGSTOP)
        time.sleep(4)
        waiting.send_signal(signal.SIGCONT)
        assert waiting.wait(60) == 1
        assert time.monotonic() - start > 5.5  # a stop counts as one second at most
    finally:
        waiting.kill()


def test_the_outermost_call_is_named():
    with limits.during("zero.save()"), limits.during("state_dict()"):
        assert "for rank 1 in zero.save(): x." in str(limits.timed_out(0, [0, 1], "x", 1))
    assert "for rank 1: x." in str(limits.timed_out(0, [0, 1], "x", 1))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero0.1/s0/b3/reducescatter/encoder.4.weight", "the gradients of 'encoder.4.weight'"),
        ("zero.1.b0.reducescatter.dense.kernel", "the gradients of 'dense.kernel'"),
        ("zero0.0/u2.1/b0/allgather/h.0.w", "the values of 'h.0.w'"),
        ("zero/agree/digest", "the start of training"),
        ("zero0.0/agree", "the beginning of the call"),
        ("zero/checkpoint/plan", "a checkpoint"),
        ("somebody's", 'collective "somebody\'s"'),
    ],
)
def test_collectives_are_named_in_the_users_words(name, words):
    assert words in limits.in_words(name)
    assert repr(name) in limits.in_words(name)


CHECK, SHUTDOWN = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"


@pytest.mark.parametrize(
    ("given", "check", "shutdown"),
    [
        ({}, "60", "300"),
        ({"ZEROHVD_TIMEOUT": "1800"}, "60", "1800"),
        ({"ZEROHVD_TIMEOUT": "7.5"}, "1", "8"),
        ({CHECK: "400"}, "400", "400"),  # Horovod would ignore a limit below
        ({CHECK: "20", SHUTDOWN: "450"}, "20", "450"),
        ({SHUTDOWN: "0"}, "60", "0"),
    ],
)
def test_horovod_is_told_the_limit_unless_the_user_has_set_one(given, check, shutdown):
    environ = dict(given)
    assert limits.end_stalled_collectives(environ) == (SHUTDOWN not in given)
    assert (environ[CHECK], environ[SHUTDOWN]) == (check, shutdown)


SHUT_DOWN = RuntimeError("Horovod has been shut down. This was caused by an exception ...")


def test_the_end_of_horovod_is_explained(monkeypatch):
    monkeypatch.delenv(SHUTDOWN, raising=False)
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    error = str(limits.explain(SHUT_DOWN, 1, range(2), "a bucket"))
    assert "rank 1 waits in vain: a bucket. Horovod was shut down, because rank 0 ended." in error
    monkeypatch.setenv(SHUTDOWN, "9")
    assert "or did not come within 9 s. Those missing" in str(limits.explain(SHUT_DOWN, 1, [1], ""))
    assert limits.explain(RuntimeError("out of memory"), 1, range(2), "") is None
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # there, hvd.elastic.run has to recognise it
    assert limits.explain(SHUT_DOWN, 1, range(2), "a bucket") is None


def test_after_a_failed_wait_a_process_ends_though_others_do_not_let_it():
    code = (
        "import atexit, time\n"
        "atexit.register(time.sleep, 60)\n"  # as MPI does, for a rank that is frozen
        "from zerohvd import limits\n"
        "limits._END_SECONDS = 0.5\n"
        "raise limits.timed_out(0, [0, 1], 'a bucket', 1.0)\n"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert time.monotonic() - start < 30
    assert done.returncode == 1
    assert "WaitTimeoutError: rank 0 has waited 1 s for rank 1: a bucket" in done.stderr
    assert "have not let this one end within 0 s. It leaves" in done.stderr


def test_ranks_that_have_met_again_may_take_their_time_to_end():
    code = (
        "import atexit, time\n"
        "atexit.register(time.sleep, 2)\n"  # a user's own, such as an upload
        "from zerohvd import ending, limits\n"
        "limits._END_SECONDS = 0.5\n"
        "limits.timed_out(0, [0, 1], 'a bucket', 1.0)\n"
        "ending.free_the_end()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
