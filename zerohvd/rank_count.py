"""Ranks that a launcher started and that do not find each other: told on every one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from zerohvd import launching, versions
from zerohvd.launchers import Launcher, detect
from zerohvd.limits import is_elastic

ALONE = "ZEROHVD_ALONE"


def check_ranks(environ: Mapping[str, str], size: int) -> None:
    """Raise if the launcher started several ranks and Horovod, of `size`, knows of one only.

    Every process would train on its own then, all of them as rank 0, and overwrite each other's
    checkpoints: the commonest accident on a cluster, and a silent one.
    """
    launcher = detect(environ)
    if launcher.size is None or launcher.size < 2 or size != 1 or _is_meant(environ):
        return
    libmpi = launching.horovod_libmpi()
    raise RuntimeError(
        f"this is rank {launcher.rank} of {launcher.size} that {launcher.name} started "
        f"({launcher.evidence}={launcher.size}), but Horovod sees one: each of them would train "
        f"alone. {fix(launcher, environ, libmpi, _mpirun())}. `zerohvd doctor`, started in the "
        f"same way, says more. If they are meant to be separate trainings: {ALONE}=1"
    )


def _is_meant(environ: Mapping[str, str]) -> bool:
    # An elastic job may shrink to one rank, and its variables speak of its start.
    return environ.get(ALONE, "0") not in ("", "0") or is_elastic(environ)


def _mpirun() -> Path | None:
    try:
        return launching.find_mpirun()
    except launching.LaunchError:
        return None


def fix(
    launcher: Launcher, environ: Mapping[str, str], libmpi: Path | None, mpirun: Path | None
) -> str:
    """What to write instead of the launch that `launcher` speaks of.

    Args:
        libmpi: The MPI that Horovod loads; None: it was built without one.
        mpirun: The launcher of that MPI, if it was found.
    """
    count = launcher.size or "N"
    if launcher.flavour == "Gloo":
        return f"Horovod needs Gloo for this launch: run `{versions.REINSTALL_HOROVOD}`"
    if libmpi is None:
        return f"Horovod was built without MPI: write `horovodrun -np {count} python ...`"
    with_mpirun = f"`{mpirun} -np {count} python ...`" if mpirun else f"the launcher of {libmpi}"
    if launcher.name != "srun":
        return f"{launcher} belongs to another MPI than {libmpi}, Horovod's: write {with_mpirun}"
    return f"{_fix_of_srun(environ, libmpi)}; or, inside the job, {with_mpirun}"


def _fix_of_srun(environ: Mapping[str, str], libmpi: Path) -> str:
    spoken = _spoken_by_srun(environ)
    is_open_mpi = libmpi.name.startswith("libmpi.so.40")
    wanted = "pmix" if is_open_mpi else "pmi2"
    if spoken == wanted == "pmix":
        return (
            f"Slurm's PMIx and that of {libmpi} do not understand each other: "
            "`export PMIX_MCA_psec=native` before `srun --mpi=pmix python ...`"
        )
    said = f"srun was told --mpi={spoken}, and {libmpi}, Horovod's MPI, needs --mpi={wanted}"
    if is_open_mpi and _is_wheel(libmpi):
        # PyPI's Open MPI has no munge, which Slurm's PMIx would choose to prove who is who.
        return f"{said}: write `PMIX_MCA_psec=native srun --mpi=pmix python ...`"
    return f"{said}: write `srun --mpi={wanted} python ...` (`srun --mpi=list`: what there is)"


def _spoken_by_srun(environ: Mapping[str, str]) -> str:
    if "PMIX_RANK" in environ:
        return "pmix"
    return "pmi2" if "PMI_RANK" in environ else "none"


def _is_wheel(libmpi: Path) -> bool:
    prefix = Path(sys.prefix)
    return libmpi.is_relative_to(prefix) or libmpi.resolve().is_relative_to(prefix.resolve())


def warn_of_lonely_ranks(environ: Mapping[str, str] = os.environ) -> None:
    """Say, before Horovod starts, that srun gave its tasks no way to find each other.

    Open MPI ends such a process while Horovod is initialised, with words of its own.
    """
    launcher = detect(environ)
    if launcher.name != "srun" or (launcher.size or 1) < 2 or _is_meant(environ):
        return
    spoken = _spoken_by_srun(environ)
    libmpi = None if spoken == "pmix" else launching.horovod_libmpi()
    # Another Open MPI than PyPI's may have been built for PMI2.
    if libmpi is not None and (spoken == "none" or _is_wheel(libmpi)):
        print(
            f"zerohvd: this is rank {launcher.rank} of {launcher.size} that srun started, and "
            f"they cannot find each other. {fix(launcher, environ, libmpi, _mpirun())}",
            file=sys.stderr,
            flush=True,
        )
