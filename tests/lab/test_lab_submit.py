"""`zerohvd submit` hands its script to a real Slurm."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from slurm import Slurm

SUBMIT = [sys.executable, "-m", "zerohvd", "submit", "--scheduler=slurm"]


def submitted(slurm: Slurm, folder: Path, *words: str) -> tuple[str, Path]:
    """The job's number, and the file of its output."""
    # Slurm writes where the job was submitted.
    here = ["bash", "-c", 'cd "$0" && exec "$@"', str(folder)]
    done = slurm.run([*here, *SUBMIT, "--name=job", *words])
    assert done.ok, done.explain()
    job = re.search(r"Submitted batch job (\d+)", done.stdout)[1]
    return job, folder / f"job-{job}.out"


def test_every_node_gets_its_ranks_and_settings(slurm, tmp_path):
    say = 'echo "$SLURM_PROCID $(hostname) $OMP_NUM_THREADS $ZEROHVD_TIMEOUT ${PMIX_RANK:-none}"'
    where = ["--nodes=2", "--ranks-per-node=2", "--cpus-per-rank=2", "--time=0:10:00"]
    job, output = submitted(slurm, tmp_path, *where, "--", "bash", "-c", say)
    assert slurm.wait(job, 60) == "COMPLETED", output.read_text()
    # This Slurm binds nothing to cores, and says so.
    said = [line for line in output.read_text().splitlines() if not line.startswith("srun:")]
    assert sorted(said) == ["0 h1 1 300 0", "1 h1 1 300 1", "2 h2 1 300 2", "3 h2 1 300 3"]


def test_a_rank_that_fails_ends_the_job(slurm, tmp_path):
    fails = '[ "$SLURM_PROCID" = 1 ] && exit 7; sleep 100'
    job, output = submitted(slurm, tmp_path, "--ranks-per-node=2", "--", "bash", "-c", fails)
    start = time.monotonic()
    assert slurm.wait(job, 60) == "FAILED", output.read_text()
    assert time.monotonic() - start < 30
