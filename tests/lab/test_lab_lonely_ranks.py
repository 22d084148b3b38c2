"""Ranks of a launcher that Horovod's MPI does not understand: none of them trains alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import packages
import pytest
from frameworks import has, needs_torch

JOB = Path(__file__).with_name("count_job.py")
FRAMEWORKS = [name for name in ("torch", "keras") if has("tensorflow" if name == "keras" else name)]


def job(framework="torch"):
    return [sys.executable, str(JOB), framework]


@pytest.fixture(scope="module")
def mpich(tmp_path_factory):
    """The launcher of another MPI; nothing is installed."""
    folder = tmp_path_factory.mktemp("mpich")
    try:
        for package in ("mpich", "libslurm38", "libhwloc15"):
            packages.extract(package, folder)
    except packages.NotHereError as error:
        pytest.skip(f"no other MPI: {error}")
    libraries = ":".join(map(str, (folder / "usr" / "lib").glob("*-linux-gnu")))
    return ["env", f"LD_LIBRARY_PATH={libraries}", str(folder / "usr" / "bin" / "mpiexec.hydra")]


@needs_torch
def test_srun_without_an_mpi_ends_every_task_with_the_line_to_write(slurm):
    done = slurm.run(["srun", "-n2", "--mpi=none", *job()])
    assert not done.ok and "trains" not in done.stdout, done.explain()
    for rank in range(2):
        said = re.search(rf"this is rank {rank} of 2 that srun started.*", done.stderr)
        assert said and "srun --mpi=pmix python ..." in said[0], done.explain(lines=60)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_launcher_of_another_mpi_ends_every_rank_with_the_line_to_write(
    framework, hosts, mpich
):
    done = hosts["h1"].run([*mpich, "-n", "2", *job(framework)], timeout=90)
    assert not done.ok and "trains" not in done.stdout, done.explain()
    for rank in range(2):
        said = re.search(rf"this is rank {rank} of 2 that mpirun started.*", done.stderr)
        assert said and "bin/mpirun -np 2 python ..." in said[0], done.explain(lines=60)


@needs_torch
def test_one_process_in_an_allocation_of_several_tasks_trains(slurm, tmp_path):
    """By hand in a shell of salloc, and in a batch script."""
    by_hand = slurm.run(["salloc", "-n4", *job()])
    assert "trains as rank 0 of 1" in by_hand.stdout, by_hand.explain()
    output = tmp_path / "out"
    words = ["--wait", "-n4", f"--output={output}", "--wrap", " ".join(job())]
    batch = slurm.run(["sbatch", *words])
    assert batch.ok and "trains as rank 0 of 1" in output.read_text(), batch.explain()
