"""Which launcher started this process, told from its environment alone.

Launchers nest: `mpirun` inside an `sbatch` script, `mpiexec.hydra` whose daemons were started by
`srun`, `jsrun` that also sets Open MPI's variables. The order of the rules in `detect` is
therefore part of what they say: the launcher closest to the process comes first.

A batch system that only reserved nodes has launched nothing: such a process is `none` with an
`allocation`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

# Step ids at the top of the 32-bit range are Slurm's own steps (batch script, interactive shell,
# extern), of which a job has one whatever its number of tasks.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0

# How `horovodrun` calls Open MPI's mpirun; it leaves no variable of its own in the ranks.
_HOROVODRUN_MPI_MARKS = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^openib",
    "OMPI_MCA_orte_tag_output": "1",
}

_OF_HYDRA = ("MPICH, Intel MPI or another PMI", "Intel MPI")


@dataclass(frozen=True)
class Launcher:
    """What the environment says about how this process was started.

    Attributes:
        name: `horovodrun`, `mpirun`, `srun`, `jsrun` or `none`.
        flavour: What distinguishes two launchers of the same name, such as `Open MPI`; or empty.
        size: How many ranks were launched; None when nothing was launched.
        rank: This process's rank in that launch.
        local_size: How many of the ranks run on this machine, where the launcher says so.
        allocation: `Slurm`, `PBS` or `LSF` when the process runs inside such a job.
        evidence: The variable that decided.
    """

    name: str
    flavour: str = ""
    size: int | None = None
    rank: int | None = None
    local_size: int | None = None
    allocation: str | None = None
    evidence: str | None = None

    @property
    def launched(self) -> bool:
        """Whether this process is one of the ranks of a launch."""
        return self.size is not None

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for the launch: rank 0, or a process on its own."""
        return self.rank in (None, 0)

    def __str__(self) -> str:
        name = f"{self.name} ({self.flavour})" if self.flavour else self.name
        if self.launched:
            name += f", rank {self.rank} of {self.size}"
        if self.allocation:
            name += f", inside a {self.allocation} job"
        return name


def detect(environ: Mapping[str, str]) -> Launcher:
    """The launcher that `environ` (usually `os.environ`) speaks of."""
    allocation = _allocation(environ)
    for rule in (_horovodrun_gloo, _jsrun, _open_mpi, _hydra, _srun):
        found = rule(environ, allocation)
        if found is not None:
            return found
    return Launcher("none", allocation=allocation)


def _horovodrun_gloo(environ: Mapping[str, str], allocation: str | None) -> Launcher | None:
    # HOROVOD_SIZE alone may be a leftover; only a launcher knows the address to meet at.
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in environ:
        return None
    return _launcher(
        environ,
        allocation,
        name="horovodrun",
        flavour="Gloo",
        size="HOROVOD_SIZE",
        rank="HOROVOD_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
    )


def _jsrun(environ: Mapping[str, str], allocation: str | None) -> Launcher | None:
    return _launcher(
        environ,
        allocation,
        name="jsrun",
        size="JSM_NAMESPACE_SIZE",
        rank="JSM_NAMESPACE_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
    )


def _open_mpi(environ: Mapping[str, str], allocation: str | None) -> Launcher | None:
    by_horovodrun = all(environ.get(k) == v for k, v in _HOROVODRUN_MPI_MARKS.items())
    return _launcher(
        environ,
        allocation,
        name="horovodrun" if by_horovodrun else "mpirun",
        flavour="MPI" if by_horovodrun else "Open MPI",
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )


def _hydra(environ: Mapping[str, str], allocation: str | None) -> Launcher | None:
    # `srun --mpi=pmi2` sets PMI_SIZE too; the local variables come from Hydra itself, whose
    # daemons are a Slurm step (of one task per node) when they were started by srun.
    if _in_slurm_step(environ) and "MPI_LOCALNRANKS" not in environ:
        return None
    return _launcher(
        environ,
        allocation,
        name="mpirun",
        flavour=_OF_HYDRA["I_MPI_MPIRUN" in environ],
        size="PMI_SIZE",
        rank="PMI_RANK",
        local_size="MPI_LOCALNRANKS",
    )


def _srun(environ: Mapping[str, str], allocation: str | None) -> Launcher | None:
    if not _in_slurm_step(environ):
        return None
    # A step may be smaller than its job (`srun -n 1` in a job of 8): the step's own count first.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    found = _launcher(environ, allocation, name="srun", size=size, rank="SLURM_PROCID")
    if found is None:
        return None
    return Launcher(
        name=found.name,
        size=found.size,
        rank=found.rank,
        local_size=_slurm_tasks_here(environ),
        allocation=allocation,
        evidence=found.evidence,
    )


def _launcher(
    environ: Mapping[str, str],
    allocation: str | None,
    *,
    name: str,
    size: str,
    rank: str,
    flavour: str = "",
    local_size: str = "",
) -> Launcher | None:
    ranks, own = _integer(environ, size), _integer(environ, rank)
    if ranks is None or own is None:
        return None
    return Launcher(
        name=name,
        flavour=flavour,
        size=ranks,
        rank=own,
        local_size=_integer(environ, local_size),
        allocation=allocation,
        evidence=size,
    )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process; a batch script has SLURM_NTASKS and PROCID as well."""
    step = _integer(environ, "SLURM_STEP_ID")
    return step is not None and step < _FIRST_SPECIAL_SLURM_STEP


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """This node's count in a list such as `2(x3),1`: tasks on three nodes, then on a fourth."""
    node = _integer(environ, "SLURM_NODEID")
    if node is None:
        return None
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        tasks, _, times = part.partition("(x")
        count = times.rstrip(")") or "1"
        if not (tasks.isdigit() and count.isdigit()):
            return None
        node -= int(count)
        if node < 0:
            return int(tasks)
    return None


def _allocation(environ: Mapping[str, str]) -> str | None:
    if "SLURM_JOB_ID" in environ:
        return "Slurm"
    if "PBS_JOBID" in environ or "PBS_NODEFILE" in environ:
        return "PBS"
    if "LSB_JOBID" in environ:
        return "LSF"
    return None


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def allow_single_process(environ: MutableMapping[str, str]) -> None:
    """Let a script that no launcher started run as the only rank.

    Open MPI starts a daemon of its own for such a process, and aborts where that is not found, as
    in its wheel from PyPI. A process that stays alone does not need it; nor does one that the
    launcher of another MPI started, which then lives long enough for `rank_count` to say so.
    """
    launcher = detect(environ)
    if not launcher.launched or launcher.flavour in _OF_HYDRA:
        environ.setdefault("OMPI_MCA_ess_singleton_isolated", "1")


# Horovod's own default of 128 MiB is for gradients that come one by one. Buckets travel as they
# are: put together, they would only be copied twice more.
FUSION_BYTES = 16 << 20


def spare_fusion_buffers(environ: MutableMapping[str, str]) -> None:
    """Let Horovod, when it is initialised, have small buffers for putting tensors together.

    It takes two of them on every rank. A user's own setting stays, and so does Horovod's search
    for the best one, which a setting would end.
    """
    if environ.get("HOROVOD_AUTOTUNE", "0") in ("", "0"):
        environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_BYTES))
