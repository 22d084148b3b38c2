"""A rank is killed, a rank is stopped for a while, a link is cut: the job ends, or goes on."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from frameworks import needs_keras, needs_torch
from hosts import Hosts

from zerohvd.checkpoint import Reader
from zerohvd.checkpoint.manager.folder import checkpoints
from zerohvd.launching import end_session, find_mpirun

JOB = Path(__file__).with_name("fault_job.py")
HOSTS = "h1:1,h2:1"
# Seconds: what takes minutes by default. Open MPI's daemons notice a cut link after 5 + 3 x 2 here,
# and ranks say after a fifth of their limit for whom they wait.
LIMITS = {
    "ZEROHVD_TIMEOUT": "12",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90",  # Keras: of a slow start as well
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "20",
    "OMPI_MCA_oob_tcp_keepalive_time": "5",
    "OMPI_MCA_oob_tcp_keepalive_intvl": "2",
    "OMPI_MCA_oob_tcp_keepalive_probes": "3",
}
PAUSE = 4.0


class Job:
    """Two ranks, on two hosts, that train until something happens."""

    def __init__(self, hosts: Hosts, launcher: str, framework: str, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        job = [sys.executable, str(JOB), framework, str(folder)]
        self.output = folder / "output"
        self.process = hosts["h1"].start([*self._launch(launcher), *job], self.output, LIMITS)

    def _launch(self, launcher: str) -> list[str]:
        if launcher == "horovodrun":
            return ["horovodrun", "--gloo", "-np", "2", "-H", HOSTS]
        mpirun = find_mpirun()
        names = [name for name in LIMITS if not name.startswith("OMPI_")]  # which it passes itself
        passed = [word for name in ("PATH", "PYTHONPATH", *names) for word in ("-x", name)]
        prefix = ["--prefix", str(mpirun.parent.parent)]
        return [str(mpirun), *prefix, "--bind-to", "none", "-np", "2", "--host", HOSTS, *passed]

    def step(self) -> int:
        files = [self.folder / f"step {rank}" for rank in range(2)]
        return min(int(f.read_text() or 0) if f.exists() else 0 for f in files)

    def wait_for(self, what: Callable[[], bool], seconds: float) -> float:
        start = time.monotonic()
        while not what():
            waited = time.monotonic() - start
            assert waited < seconds, f"{waited:.0f} s in vain: {self.output.read_text()[-3000:]}"
            time.sleep(0.05)
        return time.monotonic() - start

    def trains(self, steps: int = 12, seconds: float = 90) -> None:
        goal = self.step() + steps
        self.wait_for(lambda: self.step() >= goal or self.ended(), seconds)
        assert not self.ended(), self.output.read_text()[-3000:]

    def ended(self) -> bool:
        return self.process.poll() is not None

    def signal(self, rank: int, number: int) -> None:
        """To a rank, by its number on its own host."""
        pid = (self.folder / f"pid {rank}").read_text()
        done = self.hosts[f"h{rank + 1}"].run(["kill", f"-{number}", pid])
        assert done.ok, done.explain()

    def ranks_left(self) -> list[str]:
        """Ranks that still run, on any host."""
        found = [(h.name, h.run(["pgrep", "-f", str(self.folder)]).stdout) for h in self.hosts]
        return [f"{name}: {pids}" for name, pids in found if pids.strip()]


@pytest.fixture
def start(hosts, tmp_path):
    jobs = []

    def started(launcher: str, framework: str) -> Job:
        jobs.append(Job(hosts, launcher, framework, tmp_path))
        return jobs[-1]

    yield started
    for job in jobs:
        end_session(job.process)


def loadable(folder: Path) -> None:
    found = checkpoints(folder / "checkpoints")
    assert found
    for path in found.values():
        assert not list(Reader.open(path).check_all())


@needs_torch
def test_a_killed_rank_ends_the_job(start, tmp_path):
    job = start("mpirun", "torch")
    job.trains()
    job.signal(1, signal.SIGKILL)
    job.wait_for(job.ended, 30)
    assert job.process.returncode != 0
    job.wait_for(lambda: not job.ranks_left(), 30)
    loadable(tmp_path)


@pytest.mark.parametrize(
    ("launcher", "framework"),
    [
        pytest.param("mpirun", "torch", marks=needs_torch),
        pytest.param("mpirun", "keras", marks=needs_keras),
        pytest.param("horovodrun", "torch", marks=needs_torch),
    ],
)
def test_a_stopped_rank_goes_on_and_a_cut_link_ends_the_job(launcher, framework, start, tmp_path):
    job = start(launcher, framework)
    job.trains()
    job.signal(1, signal.SIGSTOP)
    time.sleep(PAUSE)
    job.signal(1, signal.SIGCONT)
    job.trains()
    job.hosts["h2"].cut()
    job.wait_for(job.ended, 60)
    assert job.process.returncode != 0
    job.wait_for(lambda: not job.ranks_left(), 60)
    loadable(tmp_path)
    if framework == "torch" and launcher == "mpirun":
        assert "rank 0 has waited" in job.output.read_text()
