"""A real Slurm job that comes to the end of its time: it is requeued, and ends as if never left."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("slurm", reason="needs the lab's Slurm")
from frameworks import needs_torch
from slurm import Slurm

JOB = Path(__file__).parent.parent / "launch" / "preempted_torch_job.py"
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks=2 --time=1 --array=3 --requeue --open-mode=append
echo "start ${{SLURM_RESTART_COUNT:-0}}"
srun --mpi=pmix {python} {job} 2 {steps} 0.1 {folder} workers
echo "ended with $?"
"""
# More than fit into the minute, the shortest time that Slurm gives, without its last ten seconds.
STEPS = 500


def let_it_start(slurm: Slurm, output: Path) -> None:
    """Slurm starts a requeued job only when the credentials of the first start are out of date."""
    for _ in range(180):
        time.sleep(0.5)
        pending = slurm.run(["squeue", "-h", "-t", "PENDING", "-o", "%i"]).stdout.split()
        if pending:
            slurm.run(["scontrol", "update", f"JobId={pending[0]}", "StartTime=now"])
        said = output.read_text() if output.exists() else ""
        if "start 1" in said or re.search(r"ended with (?!85)", said):
            return


@needs_torch
def test_a_job_that_comes_to_the_end_of_its_time_is_requeued_and_goes_on(slurm, tmp_path):
    output = tmp_path / "output"
    script = SCRIPT.format(python=sys.executable, job=JOB, steps=STEPS, folder=tmp_path)
    (tmp_path / "job.sh").write_text(script)
    job = slurm.submit(f"--output={output}", str(tmp_path / "job.sh"))
    let_it_start(slurm, output)
    state = slurm.wait(f"{job}_3", timeout=60)
    said = output.read_text()
    assert state == "COMPLETED", said
    assert "asked to leave (the end of the job's time on rank 0)" in said
    assert f"Slurm job {job}_3 is requeued" in said
    # The job itself has compared the losses with those of one stretch.
    assert len(json.loads((tmp_path / "losses").read_text())) == STEPS, said
