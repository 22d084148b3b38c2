"""How many of a machine's cores one rank can count on, and what follows from it.

Frameworks take as many threads as there are cores, in every rank: with 8 ranks on a host that is 8
threads per core, which wait for each other. `settle` gives each rank its share instead, where the
user has said nothing.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from zerohvd.launchers import detect

YIELD = "OMPI_MCA_mpi_yield_when_idle"
# A user who sets one of these has decided.
_THREADS_OF_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Cores:
    """What this process may run on.

    Attributes:
        here: Cores of the job on this machine: of its cpuset, else all.
        allowed: Those this process may run on, fewer where the launcher has bound it.
        quota: Cores' worth of time that its container may use; None: no limit.
    """

    here: int
    allowed: int
    quota: int | None = None

    def threads(self, ranks: int) -> int:
        """How many threads each of `ranks` ranks on this machine can keep busy."""
        # Ranks that were bound to sets of cores have to share theirs only if these overlap.
        sharers = max(1, math.ceil(ranks * self.allowed / self.here))
        threads = self.allowed // sharers
        if self.quota is not None:
            threads = min(threads, self.quota // ranks)
        return max(1, threads)

    def crowded_by(self, ranks: int) -> bool:
        """Whether `ranks` ranks and as many threads of Horovod outnumber the cores."""
        return 2 * ranks > min(self.here, self.quota or self.here) or self.allowed < 2


def look() -> Cores:
    """Read what the kernel says."""
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    here = _cpuset() or os.cpu_count() or allowed
    return Cores(max(here, allowed), allowed, parse_quota(_read("/sys/fs/cgroup/cpu.max")))


def settle(
    threads_now: int | None,
    set_threads: Callable[[int], None],
    how: str,
    *,
    is_started: bool,
    environ: MutableMapping[str, str] = os.environ,
    cores: Cores | None = None,
) -> None:
    """Give this rank its share of the cores, and tell so once per job.

    Args:
        threads_now: What the framework would take; 0: it has not decided; None: the user has.
        set_threads: The framework's own call; a RuntimeError of it means: too late, leave it.
        how: The user's own way to set it, for the line that is printed.
        is_started: Whether Horovod, and with it MPI, has been initialised.
    """
    launcher = detect(environ)
    ranks = launcher.local_size
    if ranks is None or (launcher.size or 1) < 2 or multiprocessing.parent_process() is not None:
        return
    cores = cores or look()
    said = []
    threads = cores.threads(ranks)
    if threads_now:
        # torch leaves the second thread of a core alone, on purpose.
        threads = min(threads, threads_now)
    if _is_default(threads_now, cores) and not _has_decided(environ) and threads != threads_now:
        plural = "thread" if threads == 1 else "threads"
        with contextlib.suppress(RuntimeError):
            set_threads(threads)
            said.append(
                f"{threads} {plural} per rank ({how} or OMP_NUM_THREADS sets another number)"
            )
    if launcher.flavour != "Gloo" and cores.crowded_by(ranks):
        said += _let_mpi_yield(environ, is_started)
    if said and launcher.is_first:
        where = f"{ranks} ranks on {min(cores.here, cores.quota or cores.here)} cores"
        print(f"zerohvd: {where}: {', '.join(said)}", file=sys.stderr, flush=True)


def _let_mpi_yield(environ: MutableMapping[str, str], is_started: bool) -> list[str]:
    """Have Open MPI give its core away while it waits; return what is to be told."""
    # The second is its own word for ranks of which it knows that they outnumber the cores.
    if YIELD in environ or environ.get("OMPI_MCA_mpi_oversubscribe") == "1":
        return []
    if is_started:
        return [f"MPI polls while it waits, on too few cores: export {YIELD}=1"]
    environ[YIELD] = "1"
    return ["MPI that gives its core away while it waits"]


def _has_decided(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in _THREADS_OF_USER)


def _is_default(threads: int | None, cores: Cores) -> bool:
    """Whether a framework would have chosen `threads` itself: all cores, or one of two twins."""
    own = {cores.allowed, cores.here, os.cpu_count() or 1}
    return threads in {0, *own, *(count // 2 for count in own)}


def parse_quota(text: str) -> int | None:
    """Cores' worth of time in a control group's cpu.max, such as `200000 100000`."""
    quota, _, period = text.strip().partition(" ")
    if not (quota.isdigit() and period.isdigit()):
        return None  # "max 100000": no limit
    return max(1, int(quota) // int(period))


def _cpuset() -> int | None:
    """Cores of this process's control group, of either version."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds in ("", "cpuset"):
            root = "/sys/fs/cgroup" if kinds == "" else "/sys/fs/cgroup/cpuset"
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
                count = count_cores(_read(f"{root}{path}/{name}"))
                if count:
                    return count
    return None


def count_cores(text: str) -> int:
    """How many a list such as `0-3,8` has."""
    count = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            count += int(last or first) - int(first) + 1
    return count


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
