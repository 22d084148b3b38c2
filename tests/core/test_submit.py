"""Job scripts: in the documented syntax of each scheduler, and with the behaviour they promise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from zerohvd.tools.cli import main
from zerohvd.tools.submit.scripts import EXIT_CODE, SCHEDULERS, Job

# Options of sbatch(1), of qsub(1B) of OpenPBS 23, of bsub(1) of LSF 10, with what they take.
DOCUMENTED = {
    "slurm": r"""--job-name=[\w.-]+|--nodes=\d+|--ntasks-per-node=\d+|--cpus-per-task=\d+
        |--gpus-per-node=\d+|--time=\d+:\d\d:\d\d|--partition=\w+|--account=\w+|--output=\S+
        |--open-mode=append|--requeue|--signal=(B:)?USR1@\d{1,5}""",
    "pbs": r"""-N\ [A-Za-z][\w.-]{0,14}|-l\ select=\d+(:(ncpus|mpiprocs|ompthreads|ngpus)=\d+)+
        |-l\ place=scatter|-l\ walltime=\d+:\d\d:\d\d|-q\ \w+|-A\ \w+|-j\ oe|-r\ y""",
    "lsf": r"""-J\ [\w.-]+|-n\ \d+|-R\ "span\[ptile=\d+\]"|-R\ "affinity\[core\(\d+\)\]"
        |-gpu\ "num=\d+"|-W\ \d+:\d\d|-q\ \w+|-P\ \w+|-o\ \S+|-r|-Q\ \d+|-wa\ USR1|-wt\ \d+""",
}
MARK = {"slurm": "#SBATCH ", "pbs": "#PBS ", "lsf": "#BSUB "}


def job(**changes):
    given = {"command": ["python", "train.py", "--name", "a b"], "nodes": 4, "ranks_per_node": 8}
    return Job(**{**given, "time": "24:00:00", **changes})


def written(scheduler, **changes):
    return SCHEDULERS[scheduler][1](job(**changes))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("mpi", ["openmpi", "mpich", None])
def test_directives_are_those_of_the_manual_and_the_rest_is_bash(scheduler, mpi):
    script = written(scheduler, mpi=mpi, gpus_per_node=8, queue="long", account="me")
    lines = [line for line in script.splitlines() if line.startswith(MARK[scheduler])]
    assert len(lines) >= 8
    for line in lines:
        text = line.removeprefix(MARK[scheduler])
        assert re.fullmatch(DOCUMENTED[scheduler], text, re.X), line
    # Schedulers stop looking for directives at the first command.
    first = next(i for i, s in enumerate(script.splitlines()) if s and not s.startswith("#"))
    assert not any(s.startswith(MARK[scheduler]) for s in script.splitlines()[first:])
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python train.py --name 'a b'" in script


def test_slurm_warns_requeues_and_goes_on_in_the_same_file():
    script = written("slurm")
    for line in ("--signal=USR1@120", "--requeue", "--open-mode=append", "--ntasks-per-node=8"):
        assert f"#SBATCH {line}\n" in script
    assert "srun --mpi=pmix" in script
    assert "srun --mpi=pmi2" in written("slurm", mpi="mpich")


def test_crowded_ranks_yield():
    assert "mpi_yield_when_idle=1" in written("slurm", cpus_per_rank=1)
    assert "mpi_yield_when_idle" not in written("slurm", cpus_per_rank=4)
    assert "OMP_NUM_THREADS=3\n" in written("slurm", cpus_per_rank=4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"command": []}, "no command"),
        ({"nodes": 0}, "nodes must be 1 or more"),
        ({"time": "1 day"}, "HOURS:MINUTES:SECONDS"),
    ],
)
def test_what_makes_no_job_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        job(**changes)


def test_a_script_is_printed(capsys):
    words = ["submit", "--scheduler=lsf", "--nodes=2", "--ranks-per-node=3", "--print"]
    assert main([*words, "--", "python", "deep/train_it.py", "--print"]) == 0
    script = capsys.readouterr().out
    assert "#BSUB -n 6\n" in script
    assert "#BSUB -J train_it\n" in script
    assert "python deep/train_it.py --print" in script
    assert main([*words, "--time=soon", "--", "python"]) == 2


@pytest.mark.parametrize(
    ("scheduler", "variables"),
    [("pbs", {"PBS_O_WORKDIR": "."}), ("lsf", {"LS_SUBCWD": "."})],
)
@pytest.mark.parametrize("code", [0, 1, EXIT_CODE])
def test_the_ranks_get_the_warning_and_their_exit_code_is_the_jobs(
    scheduler, variables, code, tmp_path
):
    """Bash runs the script; an `mpirun` of ours waits for the warning."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in {
        "mpirun": f"trap 'exit {code}' USR1; touch started; while :; do sleep 0.05; done",
        "qsub": "touch submitted",
    }.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_folder / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(written(scheduler, time="0:00:03", warning=2))
    env = {**os.environ, **variables, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        env[name] = "hosts"
    process = subprocess.Popen(["bash", str(script)], cwd=tmp_path, env=env)
    try:
        if scheduler == "lsf":  # sends the warning itself
            _wait_for(tmp_path / "started")
            process.send_signal(signal.SIGUSR1)
        assert process.wait(20) == code
    finally:
        process.kill()
    assert (tmp_path / "submitted").exists() == (scheduler == "pbs" and code == EXIT_CODE)


def _wait_for(file: Path) -> None:
    for _ in range(200):
        if file.exists():
            return
        time.sleep(0.05)
    raise AssertionError(file)
