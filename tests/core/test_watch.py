"""A rank that answers nobody is found out, and one that has ended is not missed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zerohvd.peers.channel import Address, service
from zerohvd.peers.watch import Neighbour, watch_next
from zerohvd.testing import ThreadWorld

ROOT = Path(__file__).parents[2]
LISTENS = (
    "import json, sys\n"
    "from zerohvd.peers.channel import service\n"
    "print(json.dumps(service(['here', 'here']).address), flush=True)\n"
    "sys.stdin.read()\n"
)
LIMIT = 2.0


@pytest.fixture
def other():
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    yield process
    process.kill()
    process.wait()


def watched(process, limit=LIMIT):
    """A thread that watches the process; what it says when it would leave."""
    said = []
    neighbour = Neighbour(1, Address(*json.loads(process.stdout.readline())), limit)
    assert neighbour.answers() is True
    thread = threading.Thread(target=neighbour.watch, args=(0, said.append, 0.1), daemon=True)
    thread.start()
    return thread, said


def test_a_frozen_rank_is_found_out(other):
    thread, said = watched(other)
    time.sleep(0.5)
    assert thread.is_alive()
    os.kill(other.pid, signal.SIGSTOP)
    thread.join(30)
    assert not thread.is_alive()
    assert said and re.search(r"rank 0 has had no answer from rank 1 for \d+ s", said[0])


def test_a_rank_that_stops_for_a_while_is_not(other):
    thread, said = watched(other, limit=30.0)
    os.kill(other.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(other.pid, signal.SIGCONT)
    time.sleep(1.0)
    assert thread.is_alive() and not said


def test_a_rank_that_has_ended_is_not_missed(other):
    thread, said = watched(other)
    other.communicate("")
    thread.join(30)
    assert not thread.is_alive() and not said


def test_a_rank_that_was_never_heard_is_not_watched():
    nobody = Address(["127.0.0.1"], 1, "00" * 32)
    neighbour = Neighbour(1, nobody, 0.5)
    assert neighbour.answers() is None
    neighbour.watch(0, pytest.fail, 0.1)


@pytest.mark.parametrize("others", [["192.0.2.1"], ["127.0.0.2"]], ids=["nowhere", "refused"])
def test_only_the_address_that_has_answered_counts(other, others):
    """A host has addresses that lead nowhere, or to somebody else, whatever its ranks do."""
    said = []
    address = Address(*json.loads(other.stdout.readline()))
    wide = address._replace(hosts=[*address.hosts, *others])
    neighbour = Neighbour(1, wide, 2.0)
    thread = threading.Thread(target=neighbour.watch, args=(0, said.append, 0.1), daemon=True)
    thread.start()
    time.sleep(1.0)
    assert thread.is_alive()
    other.kill()
    other.wait()
    thread.join(30)
    assert not thread.is_alive() and not said  # it has ended, and is not missed


def test_ranks_find_each_other():
    def live(c):
        watch_next(c, ["one host"] * c.size)
        return True

    assert ThreadWorld(3).run(live) == [True] * 3
    assert Neighbour(0, service(["one host"] * 3).address).answers()
