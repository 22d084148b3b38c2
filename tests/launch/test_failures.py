"""One rank goes wrong: the whole job ends, soon, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerohvd.launching import launch, launch_environment, run_to_the_end

JOB = Path(__file__).with_name("failing_job.py")
SOON = 60.0


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exception", "this rank has had enough"),
        ("kill", "signal 9"),
        ("exit", "Horovod was shut down, because rank 1 ended. See the output of rank 1"),
        ("shape", "parameter '1.weight': rank 0 has '1.weight' (5, 4)"),
        ("state_dict in between", "Call it after step()"),
    ],
)
def test_a_job_with_a_failing_rank_ends_with_a_reason(how, says):
    result = launch(2, [sys.executable, str(JOB), how], timeout=SOON)
    assert not result.timed_out, result.explain()
    assert result.returncode != 0
    assert says in result.stdout + result.stderr, result.explain()


@pytest.mark.parametrize("stage", [2, 3])
def test_horovod_may_be_shut_down_and_initialised_again(stage):
    job = Path(__file__).with_name("second_init_job.py")
    result = launch(2, [sys.executable, str(job), str(stage)], timeout=SOON)
    assert result.ok, result.explain()
    assert result.stdout.count("trained again") == 2


def ranks_running() -> list[str]:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if f"{JOB} endless" in line]


def test_a_job_that_does_not_end_is_ended_with_all_its_ranks():
    result = launch(2, [sys.executable, str(JOB), "endless"], timeout=8.0)
    assert result.timed_out or result.ok  # a fast machine may finish
    assert not ranks_running()


def test_horovodrun_starts_the_example(tmp_path):
    root = Path(__file__).resolve().parents[2]
    summary = tmp_path / "summary.json"
    horovodrun = str(Path(sys.executable).parent / "horovodrun")
    script = [sys.executable, str(root / "examples/torch_gpt.py"), "--steps", "2", "--batch", "1"]
    result = run_to_the_end(
        [horovodrun, "-np", "2", *script, "--summary", str(summary)],
        timeout=180,
        env=launch_environment(),
    )
    assert result.ok, result.explain()
    assert summary.exists()


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_a_script_without_a_launcher_runs_alone(framework, tmp_path):
    script = tmp_path / "alone.py"
    name = {"torch": "torch", "keras": "tensorflow"}[framework]
    script.write_text(
        f"import horovod.{name} as hvd\n"
        f"import zerohvd.{framework} as zero\n"
        "hvd.init()\n"
        "print('size', hvd.size())\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM"))}
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**env, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "size 1"


def test_ranks_that_horovod_does_not_see_are_refused(tmp_path):
    """As under srun with the wrong --mpi: the launcher says 4, every process is alone."""
    script = tmp_path / "lost.py"
    script.write_text(
        "import torch, horovod.torch as hvd, zerohvd.torch as zero\n"
        "hvd.init()\n"
        "zero.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1))\n"
    )
    lost = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "4",
        "OMPI_MCA_ess_singleton_isolated": "1",
        "OMPI_MCA_ess": "singleton",
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **lost},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "this is rank 2 of 4 that srun started" in done.stderr, done.stderr
    assert "but Horovod sees one" in done.stderr, done.stderr
