"""Two rank processes save again and again at one path until one of them is killed; repeat.

    python checkpoint_kills.py FOLDER KILLS

After each kill the path must hold a whole checkpoint: the last that was reported finished, or the
one under way. Prints what happened as JSON; the exit code is 1 if anything was lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from checkpoint_cases import assert_holds, fetch, some_layout, store, values_of

from zerohvd.checkpoint import format, read_manifest
from zerohvd.communication.collectives import NumpyCollectives, SingleProcess
from zerohvd.communication.log import CommLog

LAYOUT = some_layout(2, scale=40)


class PairCollectives(NumpyCollectives):
    """Two processes and the socket between them; a dead partner is an error at once."""

    def __init__(self, rank: int, partner: socket.socket) -> None:
        self.rank, self.size, self.log = rank, 2, CommLog(2)
        self._file = partner.makefile("rwb")

    def _exchange(self, parts: list[bytes], call: str) -> list[bytes]:
        other = parts[1 - self.rank]
        self._file.write(struct.pack("<Q", len(other)) + other)
        self._file.flush()
        length = struct.unpack("<Q", self._file.read(8))[0]
        received = self._file.read(length)
        return [parts[0], received] if self.rank == 0 else [received, parts[1]]


def save_for_ever(path: Path, rank: int, partner: socket.socket, version: int, report: int):
    collectives = PairCollectives(rank, partner)
    while True:
        store(path, collectives, LAYOUT, version)
        if rank == 0:
            os.write(report, struct.pack("<Q", version))
        version += 1


def fork(function, *arguments) -> int:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):  # the partner has died
            function(*arguments)
        os._exit(0)
    return pid


def trial(path: Path, version: int, rng: random.Random) -> int:
    """Start two ranks, kill one; returns the last version that was reported finished."""
    ends = socket.socketpair()
    reading, writing = os.pipe()

    def rank(number):
        ends[1 - number].close()
        os.close(reading)
        save_for_ever(path, number, ends[number], version, writing)

    pids = [fork(rank, number) for number in (0, 1)]
    for end in ends:
        end.close()
    os.close(writing)
    time.sleep(rng.uniform(0.0, 0.06))
    os.kill(rng.choice(pids), signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as reports:
        told = reports.read()
    return struct.unpack("<Q", told[-8:])[0] if told else version - 1


def check(path: Path, finished: int) -> int:
    """Raise unless a whole checkpoint of at least that version is there; returns its version."""
    _, manifest = read_manifest(path)
    version = manifest.step
    assert finished <= version <= finished + 1, (finished, version)
    alone = some_layout(1, scale=40)
    assert_holds([fetch(path, SingleProcess(), alone)], values_of(alone, version))
    known = (path, format.claim_path(path))
    strangers = [p.name for p in path.parent.iterdir() if p not in known and not format.leftover(p)]
    assert not strangers, strangers
    return version


def main() -> int:
    path, kills = Path(sys.argv[1], "latest"), int(sys.argv[2])
    rng = random.Random(0)
    store(path, SingleProcess(), some_layout(1, scale=40), 0)
    version, unfinished, versions, lost = 0, 0, set(), []
    for kill in range(kills):
        finished = trial(path, version + 1, rng)
        unfinished += any(format.leftover(p) for p in path.parent.iterdir())
        try:
            version = check(path, finished)
        except Exception as error:
            lost.append(f"kill {kill}: {type(error).__name__}: {error}")
            version = finished + 1
        versions.add(version)
    told = {"kills": kills, "unfinished": unfinished, "versions": len(versions), "lost": len(lost)}
    print(json.dumps({**told, "problems": lost[:5]}))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
