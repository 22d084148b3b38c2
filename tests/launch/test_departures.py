"""Jobs whose ranks are signalled from outside: they leave, start again, and end as if never left.

More rounds than one: ZEROHVD_PREEMPTION_ROUNDS=100 python -m pytest tests/launch/test_departures.py
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import saying

from zerohvd.checkpoint.manager.folder import checkpoints
from zerohvd.launching import end_session, launch_environment, mpirun_command

JOB = Path(__file__).with_name("preempted_torch_job.py")
ROUNDS = int(os.environ.get("ZEROHVD_PREEMPTION_ROUNDS", "1"))
RANKS = 4


def start(stage: int, steps: int, folder: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, str(JOB), str(stage), str(steps), "0.01", str(folder), "workers"]
    with (folder / "printed").open("ab") as printed:
        return subprocess.Popen(
            mpirun_command(RANKS, argv),
            env=launch_environment(),
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )


def numbers(folder: Path, pattern: str, count: int) -> list[int]:
    """What `count` ranks have said since the beginning of a round; waits for it."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        found = [re.match(pattern, line) for line in saying.heard(folder)]
        hits = [int(match[1]) for match in found if match]
        if len(hits) >= count:
            return hits
        time.sleep(0.02)
    raise AssertionError((folder / "printed").read_text()[-3000:])


def forget(folder: Path) -> None:
    for file in folder.glob("said by *"):
        file.unlink()


def test_jobs_that_are_signalled_go_on_as_if_they_had_never_left(tmp_path):
    rng = random.Random(3)
    for number in range(ROUNDS):
        process = start(2, 100_000, tmp_path)
        try:
            pids = numbers(tmp_path, r"pid (\d+)", RANKS)
            time.sleep(rng.uniform(0.0, 0.3))
            if number % 2 == 0:  # mpirun passes it on to all ranks
                os.kill(process.pid, signal.SIGUSR1)
            else:
                one = rng.choice(pids)
                os.kill(one, rng.choice([signal.SIGUSR1, signal.SIGTERM]))
            code = process.wait(60)
        finally:
            end_session(process)
        assert code == 85, (tmp_path / "printed").read_text()[-3000:]
        left = numbers(tmp_path, r"left after (\d+)", RANKS)
        assert len(set(left)) == 1, left
        assert max(checkpoints(tmp_path / "checkpoints")) == left[0] + 1
        forget(tmp_path)
    process = start(2, left[0] + 10, tmp_path)
    try:
        assert process.wait(120) == 0, (tmp_path / "printed").read_text()[-3000:]
    finally:
        end_session(process)
    assert len(json.loads((tmp_path / "losses").read_text())) == left[0] + 10
