"""Two processes, jobs of one rank each, want the same path at the same moment; repeat.

    python checkpoint_races.py FOLDER TRIES

After each try the path must hold one whole checkpoint, of a job that was told that it is saved; a
job that was not must have been told who was. Every other try begins with a checkpoint there, every
third one with what a killed job has left. A third process loads all the while, and must get one of
the whole checkpoints. Prints what happened as JSON; the exit code is 1 if anything was lost.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path

from test_checkpoint_session import NumpyTraining

from zerohvd.checkpoint import CheckpointError, format, session
from zerohvd.checkpoint.writer.claim import Claim
from zerohvd.communication.collectives import SingleProcess


def child(act) -> tuple[int, int]:
    """A process, and the end of a pipe where it is going to say what became of `act`."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = act()
        except BaseException:
            said = "bad: " + traceback.format_exc()
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    return pid, reading


def finish(started: tuple[int, int]) -> str:
    pid, reading = started
    with os.fdopen(reading) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


def save_at(moment: float, path: Path, version: int) -> str:
    while time.monotonic() < moment:
        pass
    try:
        save(path, version)
    except CheckpointError as error:
        return f"told: {error}"
    return "saved"


def save(path: Path, version: int) -> None:
    session.save(path, NumpyTraining(SingleProcess(), version), session.Notes(version))


def load(path: Path) -> int:
    """The version of the checkpoint; raises if it is not whole."""
    training = NumpyTraining(SingleProcess(), -1.0)
    version = session.load(path, training)
    expected = NumpyTraining(SingleProcess(), version)
    for name in ("shard", "mean", "grad"):
        assert (getattr(training, name) == getattr(expected, name)).all(), name
    return version


def load_at(moment: float, path: Path) -> str:
    while time.monotonic() < moment:
        pass
    return f"loaded {load(path)}"


def killed_save(path: Path) -> str:
    """What a job leaves that was killed while it was saving."""
    claim = Claim.take(path, "f" * 16)
    format.partial_path(path, claim.id).mkdir()
    return "killed"


def check(path: Path, saids: dict[int, str]) -> None:
    saved = {v for v, said in saids.items() if said == "saved"}
    assert saved, saids
    for said in saids.values():
        told = f"told: {path} is being saved by another job (process "
        named = said.startswith(told) and f"on {socket.gethostname()}, since 20" in said
        assert said == "saved" or named, said
    assert load(path) in saved, saids
    assert [p.name for p in path.parent.iterdir()] == [path.name], list(path.parent.iterdir())


def main() -> int:
    folder, tries = Path(sys.argv[1]), int(sys.argv[2])
    told, problems = 0, []
    for number in range(tries):
        path = folder / str(number) / "latest"
        path.parent.mkdir()
        if number % 2:
            save(path, 0)
        if number % 3 == 0:
            finish(child(lambda p=path: killed_save(p)))
        moment = time.monotonic() + 0.005
        jobs = {v: child(lambda v=v, p=path, m=moment: save_at(m, p, v)) for v in (1, 2)}
        loading = child(lambda p=path, m=moment: load_at(m, p)) if number % 2 else None
        saids = {v: finish(job) for v, job in jobs.items()}
        loaded = finish(loading) if loading else "loaded"
        told += sum(said.startswith("told") for said in saids.values())
        try:
            assert loaded.startswith("loaded"), loaded
            check(path, saids)
        except Exception as error:
            problems.append(f"try {number}: {type(error).__name__}: {error}")
    print(json.dumps({"tries": tries, "told": told, "lost": len(problems), "problems": problems}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
