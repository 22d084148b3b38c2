"""One training, handed from launcher to launcher, on one host and on several: the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import relay
from frameworks import needs_keras, needs_torch
from hosts import ROOT, Hosts, environment
from slurm import Slurm

from zerohvd.launching import LaunchResult, find_mpirun

HERE = Path(__file__).parent
STEPS = 2  # of a leg
SECONDS = 180  # that a leg may take, on a busy machine
Launch = Callable[[Hosts, Slurm, list[str]], LaunchResult]


def mpirun(*words: str) -> Launch:
    def launch(hosts: Hosts, slurm: Slurm, job: list[str]) -> LaunchResult:
        mpi = find_mpirun()
        start = [str(mpi), "--prefix", str(mpi.parent.parent), "--bind-to", "none"]
        return hosts["h1"].run(
            [*start, "-x", "PYTHONPATH", "-x", "PATH", *words, *job], timeout=SECONDS
        )

    return launch


def horovodrun(kind: str, *words: str) -> Launch:
    def launch(hosts: Hosts, slurm: Slurm, job: list[str]) -> LaunchResult:
        # Where the other hosts find Open MPI's daemon.
        more = [f"--mpi-args=--prefix {find_mpirun().parent.parent}"] if kind == "--mpi" else []
        return hosts["h1"].run(["horovodrun", kind, *more, *words, *job], timeout=SECONDS)

    return launch


def srun(*words: str) -> Launch:
    return lambda hosts, slurm, job: slurm.run(
        ["srun", "--mpi=pmix", *words, *job], timeout=SECONDS
    )


def sbatch(nodes: int, ranks_per_node: int) -> Launch:
    """`zerohvd submit`, and the job that comes of it."""

    def launch(hosts: Hosts, slurm: Slurm, job: list[str]) -> LaunchResult:
        where = [f"--nodes={nodes}", f"--ranks-per-node={ranks_per_node}", "--cpus-per-rank=1"]
        submit = [sys.executable, "-m", "zerohvd", "submit", "--scheduler=slurm", *where, "--print"]
        written = hosts["h1"].run([*submit, "--", *job])
        assert written.ok, written.explain()
        folder = Path(job[-2])
        (folder / "job.sh").write_text(written.stdout)
        output = folder / "sbatch.out"
        done = slurm.run(
            ["sbatch", "--wait", f"--output={output}", f"{folder}/job.sh"], timeout=SECONDS
        )
        assert done.ok, done.explain() + (output.read_text() if output.exists() else "")
        return done

    return launch


# Launch, ranks, ranks on the first host.
LEGS = {
    "torch": [
        (srun("-N1", "-n2"), 2, 2),
        (horovodrun("--gloo", "-np", "4", "-H", "h1:2,h2:2"), 4, 2),
        (horovodrun("--mpi", "-np", "3", "-H", "h1:1,h2:1,h3:1"), 3, 1),
        (srun("-N2", "-n4", "--ntasks-per-node=2"), 4, 2),
        (mpirun("-np", "4", "--host", "h1:2,h2:2"), 4, 2),
        (sbatch(nodes=3, ranks_per_node=1), 3, 1),
    ],
    "keras": [
        (horovodrun("--mpi", "-np", "2"), 2, 2),
        (srun("-N3", "-n3"), 3, 1),
        (horovodrun("--gloo", "-np", "3", "-H", "h1:1,h2:1,h3:1"), 3, 1),
        (sbatch(nodes=2, ranks_per_node=2), 4, 2),
        (mpirun("-np", "4", "--host", "h1:2,h2:2"), 4, 2),
    ],
}


@pytest.mark.parametrize(
    "framework",
    [pytest.param("torch", marks=needs_torch), pytest.param("keras", marks=needs_keras)],
)
def test_a_training_goes_on_under_every_launcher(framework, hosts, slurm, tmp_path):
    job = HERE / f"relay_{framework}.py"
    legs = LEGS[framework]
    for leg, (launch, ranks, here) in enumerate(legs, start=1):
        done = launch(hosts, slurm, [sys.executable, str(job), str(tmp_path), str(leg * STEPS)])
        assert done.ok, f"leg {leg}: {done.explain(lines=40)}"
        last = relay.told(tmp_path)[-len(relay.STAGES) :]
        assert [(t["stage"], t["ranks"], t["here"]) for t in last] == [
            (stage, ranks, here) for stage in relay.STAGES
        ], f"leg {leg}: {done.explain(lines=40)}"
    expected = plain_losses(framework, STEPS * len(legs))
    for stage in relay.STAGES:
        losses = {}
        for told in relay.told(tmp_path):
            if told["stage"] == stage:
                assert not losses.keys() & told["losses"].keys(), "a leg has not gone on"
                losses |= told["losses"]
        np.testing.assert_allclose(
            list(losses.values()), expected, rtol=1e-3, err_msg=f"stage {stage}"
        )


def plain_losses(framework: str, steps: int) -> list[float]:
    if framework == "torch":
        import relay_torch

        return relay_torch.plain(steps)
    done = subprocess.run(
        [sys.executable, str(HERE / "relay_keras.py"), "plain", str(steps)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])
