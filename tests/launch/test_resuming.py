"""Jobs that end, or are killed, and go on with another number of ranks."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from zerohvd.checkpoint import Reader
from zerohvd.checkpoint.manager.folder import checkpoints
from zerohvd.launching import end_session, launch, launch_environment, mpirun_command

JOB = Path(__file__).with_name("resuming_job.py")
# One stretch of training each: ranks, stage.
WAY = {
    "torch": [(2, 1), (3, 3), (1, 2), (4, 3)],
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
        folder = tmp_path / "ckpt"
        job = [sys.executable, str(JOB), "torch", "2", "0", str(folder), *options]
        _run_until_killed(job, tmp_path / "ckpt.pids", rng)
        found = checkpoints(folder)
        assert found and max(found) >= reached, (found, reached)
        reached = max(found)
        for path in found.values():
            assert not list(Reader.open(path).check_all())


def _run_until_killed(job: list[str], pids: Path, rng: random.Random) -> None:
    """Start two ranks, and kill -9 one of them while they train and save."""
    shutil.rmtree(pids, ignore_errors=True)
    process = subprocess.Popen(
        mpirun_command(2, job),
        env=launch_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not pids.is_dir() or len(list(pids.iterdir())) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        time.sleep(rng.uniform(0.3, 1.5))
        os.kill(int(rng.choice(sorted(p.name for p in pids.iterdir()))), signal.SIGKILL)
        process.wait(60)
    finally:
        end_session(process)
