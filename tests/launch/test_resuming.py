"""Jobs that end, or are killed, and go on with another number of ranks."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from zerohvd.checkpoint import Reader
from zerohvd.checkpoint.manager import checkpoints
from zerohvd.launching import end_session, launch, launch_environment, mpirun_command

JOB = Path(__file__).with_name("resuming_job.py")
# One stretch of training each: ranks, stage.
WAY = {
    "torch": [(2, 1), (3, 2), (1, 2), (4, 0)],
    "keras": [(2, 1), (3, 2), (1, 2), (4, 0)],
}
STEPS = 5


def run(framework: str, ranks: int, stage: int, stop: int, folder: Path) -> list[float]:
    job = [sys.executable, str(JOB), framework, str(stage), str(stop), str(folder)]
    result = launch(ranks, job, timeout=120)
    assert result.ok, result.explain()
    return json.loads(re.search(r"^losses (.*)$", result.stdout, re.M)[1])


@pytest.mark.parametrize("framework", WAY)
def test_losses_go_on_over_other_numbers_of_ranks_and_stages(framework, tmp_path):
    whole = run(framework, 2, 0, STEPS * len(WAY[framework]), tmp_path / "whole")
    parts = []
    for number, (ranks, stage) in enumerate(WAY[framework], start=1):
        parts += run(framework, ranks, stage, STEPS * number, tmp_path / "parts")
    np.testing.assert_allclose(parts, whole, rtol=1e-4)
    assert whole[-1] < whole[0]


def test_killed_ranks_leave_checkpoints_that_can_be_loaded(tmp_path):
    """Real ranks, killed one by one at random moments; each job goes on where the last stopped."""
    rng = random.Random(1)
    reached = 0
    for kill in range(4):
        options = ["kill", "async"] if kill % 2 else ["kill"]
        job = [sys.executable, str(JOB), "torch", "2", "0", str(tmp_path), *options]
        _run_until_killed(job, rng)
        found = checkpoints(tmp_path)
        assert found and max(found) >= reached, (found, reached)
        reached = max(found)
        for path in found.values():
            assert not list(Reader.open(path).check_all())


def _run_until_killed(job: list[str], rng: random.Random) -> None:
    """Start two ranks, and kill -9 one of them while they train and save."""
    process = subprocess.Popen(
        mpirun_command(2, job),
        env=launch_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    guard = threading.Timer(90, end_session, [process])
    guard.start()
    try:
        assert process.stdout is not None
        pids = [int(next(line for line in process.stdout if line.startswith("pid")).split()[2])
                for _ in range(2)]  # fmt: skip
        time.sleep(rng.uniform(0.3, 1.5))
        os.kill(rng.choice(pids), signal.SIGKILL)
        process.wait(60)
    finally:
        guard.cancel()
        end_session(process)
