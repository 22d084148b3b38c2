"""A rank that waits for long says what for, and who is missing."""

from __future__ import annotations

import time

import pytest
from test_peers import joined

from zerohvd import limits
from zerohvd.communication.log import CommLog
from zerohvd.peers import channel, stalls, steps
from zerohvd.peers.channel import PeerError
from zerohvd.peers.stalls import Answer, Whereabouts, warn
from zerohvd.testing import ThreadWorld

NAME = "zero0.0/s0/b1/reducescatter/layer.weight"


@pytest.mark.parametrize("size", [2, 5, 32])
def test_every_rank_that_waits_finds_out_who_is_missing_and_what_it_does(size):
    """The last rank has not started the collective, and the first waits for another one."""

    def live(c):
        log = CommLog(c.size)
        here = Whereabouts(log)
        hosts = [f"host{r}" for r in range(c.size)]
        with joined(c, f"stall{size}") as (subject, found):
            subject.version = subject.version._replace(steps=17)
            found.tell_whereabouts(here)
            if c.rank < c.size - 1:
                here.started(NAME, lambda: False)
            elif size > 2:
                here.started(NAME, lambda: True)  # of an earlier step
            c.barrier()
            with log.waiting(NAME):
                said = here.who_is_missing(NAME, range(c.size), hosts) if c.rank == 0 else ""
                c.barrier()
            with log.waiting("unit 'x' to be gathered"):
                c.barrier()
                # Known for a while: nobody is asked again and again.
                asked = here.who_is_missing(NAME, range(c.size), hosts)
                c.barrier()
            return said, asked

    said, asked = zip(*ThreadWorld(size).run(live), strict=True)
    last = f"Missing: rank {size - 1} (host{size - 1}) has waited 0 s for something else: "
    assert said[0].startswith(last + "the gradients of 'layer.weight'")
    assert set(asked) == {said[0]}


def test_a_rank_that_waits_for_nothing_or_does_not_answer_is_told_apart():
    here = Whereabouts(CommLog(4))
    here.ask = lambda name: [Answer(True, "", 0.0, 3), Answer(False, "", 0.0, 3), None, None]
    said = here.who_is_missing(NAME, [4, 5, 6, 7], ["a", "b", "c", "d"])
    assert said.startswith("Missing: rank 5 (b) waits for nothing, after 3 steps: it computes")
    gone = "does not answer: it has ended, has left the call, or is stopped"
    assert f"rank 6 (c) {gone}; rank 7 (d) {gone}." in said
    here.ask = lambda name: [Answer(True, "", 0.0, 3)] * 4
    assert "the network" in here.who_is_missing(NAME, range(4), [])
    here.ask = lambda name: [None] * 500
    assert "and 492 other ranks" in here.who_is_missing(NAME, range(500), [])


def test_a_rank_that_cannot_ask_says_so():
    here = Whereabouts(CommLog(2))
    assert here.who_is_missing(NAME, range(2), []) == ""

    def fails(name):
        raise PeerError("rank 0 cannot be reached")

    here.ask = fails
    assert "rank 0 cannot be reached" in here.who_is_missing(NAME, range(2), [])


def test_the_warning_is_one_line_with_the_parameter(capsys):
    here = Whereabouts(CommLog(2))
    here.ask = lambda name: [Answer(True, "", 0.0, 3), Answer(False, "", 0.0, 3)]
    here.started("zero0.0/agree", lambda: False)
    here.started(NAME, lambda: False)
    with limits.during("step()"):
        warn(here, "zero0.0/agree", 0, [0, 1], ["a", "b"], 61.0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("zerohvd: rank 0 has waited 61 s for rank 1 in step(): the beginning")
    assert "Missing: rank 1 (b)" in line
    assert "In flight as well: the gradients of 'layer.weight' and its bucket" in line
    assert "ZEROHVD_TIMEOUT" in line


def test_a_wait_warns_once_and_goes_on(monkeypatch):
    monkeypatch.setenv("ZEROHVD_TIMEOUT", "60")
    monkeypatch.setattr(limits, "warning_seconds", lambda: 0.3)
    warned = []
    end = time.monotonic() + 0.6
    waited = limits.wait(lambda: time.monotonic() > end, RuntimeError, warned.append)
    assert len(warned) == 1 and 0.3 <= warned[0] < waited


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 60.0),
        ({"ZEROHVD_TIMEOUT": "100"}, 20.0),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}, 7.0),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "0"}, float("inf")),
    ],
)
def test_warnings_come_when_horovods_do(environ, seconds):
    assert limits.warning_seconds(environ) == seconds


def test_many_who_ask_the_same_ask_once():
    asked = []

    def ask(rank, name):
        asked.append(rank)
        return Answer(True, "", 0.0, 0)

    inquiry = stalls.Inquiry(3)
    assert inquiry.about(NAME, ask) == inquiry.about(NAME, ask)
    assert sorted(asked) == [0, 1, 2]
    inquiry.about("another", ask)
    assert len(asked) == 6


def test_ranks_that_are_in_a_step_for_long_find_out_who_is_not(monkeypatch, capsys):
    monkeypatch.setattr(limits, "warning_seconds", lambda: 0.1)
    monkeypatch.setattr(steps, "_LOOK", 0.05)

    def live(c):
        watch = steps.StepWatch(c, [f"host{r}" for r in range(c.size)], "model.fit()")
        watch.begin()
        c.barrier()
        time.sleep(0.3)  # all of them are slow together: nobody is told
        c.barrier()
        silent = not capsys.readouterr().err if c.rank == 0 else True
        c.barrier()
        if c.rank != c.size - 1:
            watch.begin()
        else:
            watch.pause()
        time.sleep(0.6)
        c.barrier()
        watch.close()
        return silent

    # One host: these threads can listen on the loopback device.
    monkeypatch.setattr(steps, "service", lambda hosts: channel.service(["one"]))
    assert all(ThreadWorld(3).run(live))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    for rank in (0, 1):
        (line,) = [x for x in lines if x.startswith(f"zerohvd: rank {rank} has waited ")]
        assert ": step 2 of model.fit(). Missing: rank 2 (host2) waits for nothing, after 1" in line
