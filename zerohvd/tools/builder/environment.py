"""What is in this environment and on this machine, found without importing any framework."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from zerohvd import versions
from zerohvd.tools.builder.errors import BuilderError

_OLDEST_CMAKE = Version("3.13")
_COMPILERS = ("g++", "c++", "clang++")
_CPP17 = "#include <optional>\nint main() { std::optional<int> x{0}; return x.value(); }\n"
# What Horovod's CMakeLists would look for in this CPU, and the compiler's word for it.
_CPU_FEATURES = ("avx", "f16c", "fma")


@dataclass(frozen=True)
class Framework:
    """A framework Horovod can be built for.

    Attributes:
        module: `torch` or `tensorflow`.
        version: With its local part, such as 2.13.0+cpu.
        distribution: The name it was installed under, such as `tensorflow-cpu`.
        cuda: The CUDA version it was built with ("yes" where it does not say); None for CPU.
    """

    module: str
    version: str
    distribution: str
    cuda: str | None = None


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Cmake:
    """The machine's cmake, or (path None) one from PyPI for the time of the build."""

    path: Path | None
    version: str


@dataclass(frozen=True)
class Machine:
    """What of this machine goes into the compiled code.

    Attributes:
        python: The tag of this Python, such as cp311.
        arch: Such as x86_64.
        libc: Such as glibc 2.36; older ones cannot load what was built here.
        cpu_features: Those of this CPU the build makes use of.
    """

    python: str
    arch: str
    libc: str
    cpu_features: tuple[str, ...]


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit and an NCCL to build GPU operations with."""

    home: Path
    version: str
    nccl_include: Path
    nccl_library: Path
    nccl_version: str

    @property
    def version_pair(self) -> tuple[str, str]:
        return self.version, self.nccl_version


def find_frameworks() -> tuple[Framework, ...]:
    """torch and TensorFlow, whichever are installed.

    Raises:
        BuilderError: Neither is.
    """
    found = tuple(f for f in (_find_torch(), _find_tensorflow()) if f is not None)
    if not found:
        raise BuilderError(
            f"Neither torch nor TensorFlow is installed in this environment ({sys.prefix}).\n"
            "Horovod is built for the frameworks it finds: install at least one of them first, "
            "for example `pip install torch` or `pip install tensorflow`, then run this again."
        )
    return found


def _find_torch() -> Framework | None:
    installed = versions.find("torch")
    if installed is None:
        return None
    text = _read(installed.folder, "version.py")
    # The metadata of some builds leaves the local part (+cpu, +cu130) out; version.py has it.
    version = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    return Framework(
        "torch",
        version.group(1) if version else installed.version or "unknown",
        installed.distribution or "torch",
        cuda.group(1) if cuda else None,
    )


def _find_tensorflow() -> Framework | None:
    installed = versions.find("tensorflow")
    if installed is None:
        return None
    text = _read(installed.folder, "python/platform/build_info.py")
    cuda = None
    if re.search(r"['\"]is_cuda_build['\"],\s*True", text):
        version = re.search(r"['\"]cuda_version['\"],\s*['\"](.+?)['\"]", text)
        cuda = version.group(1) if version else "yes"
    return Framework(
        "tensorflow",
        installed.version or "unknown",
        installed.distribution or "tensorflow",
        cuda,
    )


def _read(folder: Path | None, name: str) -> str:
    try:
        return (folder / name).read_text(errors="replace") if folder else ""
    except OSError:
        return ""


def bin_folder() -> Path:
    """Where this environment keeps its programs."""
    return Path(sys.executable).parent


def first_line(command: Sequence[str], env: Mapping[str, str] | None = None) -> str | None:
    """The first line a command prints, or None if it cannot be run or fails."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, timeout=60, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def find_compiler(environ: Mapping[str, str] = os.environ) -> Compiler:
    """The C++ compiler: $CXX, else the first of the usual names; it must know C++17.

    Raises:
        BuilderError: There is none, or it is too old.
    """
    asked = shlex.split(environ.get("CXX", ""))
    candidates = [tuple(asked)] if asked else [(name,) for name in _COMPILERS]
    for command in candidates:
        path = shutil.which(command[0], path=environ.get("PATH"))
        if path is None:
            continue
        compiler = Compiler(
            (path, *command[1:]), first_line([path, *command[1:], "--version"]) or ""
        )
        problem = try_compile([*compiler.command, "-std=c++17"], _CPP17)
        if problem is None:
            return compiler
        raise BuilderError(
            f"The C++ compiler {shlex.join(compiler.command)} cannot build a small C++17 program; "
            f"torch's and TensorFlow's headers need that.\n{problem}\n"
            "Use another compiler by setting CXX, for example CXX=g++-12."
        )
    raise BuilderError(
        f"No C++ compiler: looked for {' '.join(asked) or ', '.join(_COMPILERS)} on PATH.\n"
        "Horovod is compiled on this machine. Install one (Debian/Ubuntu: apt install g++ make; "
        "Fedora/RHEL: dnf install gcc-c++ make; conda: conda install gxx_linux-64 make), "
        "load your cluster's compiler module, or set CXX to one."
    )


def try_compile(
    command: Sequence[str], source: str, env: Mapping[str, str] | None = None
) -> str | None:
    """Compile and link `source`; None if that works, else the end of what the compiler said."""
    with tempfile.TemporaryDirectory(prefix="zerohvd-") as folder:
        return compile_into(Path(folder) / "try", command, source, env)


def compile_into(
    program: Path, command: Sequence[str], source: str, env: Mapping[str, str] | None = None
) -> str | None:
    """The same, and leaves the program at `program`."""
    file = program.with_suffix(".cc")
    file.write_text(source)
    try:
        done = subprocess.run(
            [*command, str(file), "-o", str(program)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else "\n".join(done.stderr.strip().splitlines()[-8:])


def check_build_tools() -> None:
    """Raise BuilderError unless make, Python's headers and pip are here."""
    if shutil.which("make") is None:
        raise BuilderError(
            "No `make` on PATH; Horovod's build needs it. Install it (Debian/Ubuntu: apt install "
            "make; conda: conda install make), then run this again."
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise BuilderError(
            f"Python's own headers are missing: {header} does not exist.\n"
            "Install them (Debian/Ubuntu: apt install python3-dev; Fedora/RHEL: dnf install "
            "python3-devel), or use a Python that brings them (conda, pyenv, uv)."
        )
    if versions.find("pip") is None:
        raise BuilderError(
            f"This environment has no pip ({sys.executable} -m pip fails).\n"
            f"Add it: {sys.executable} -m ensurepip (or `uv pip install pip`)."
        )


def find_cmake() -> Cmake:
    """A cmake that is new enough, in this environment or on PATH, else the one from PyPI."""
    for candidate in (bin_folder() / "cmake", shutil.which("cmake")):
        line = first_line([str(candidate), "--version"]) if candidate else None
        number = re.search(r"\d+\.\d+(\.\d+)?", line or "")
        if number and Version(number.group()) >= _OLDEST_CMAKE:
            return Cmake(Path(str(candidate)), number.group())
    return Cmake(None, "from PyPI")


def look_at_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    here = set(flags.group(1).split()) if flags else set()
    return Machine(
        python=f"cp{sys.version_info[0]}{sys.version_info[1]}{getattr(sys, 'abiflags', '')}",
        arch=platform.machine(),
        libc=" ".join(platform.libc_ver()),
        cpu_features=tuple(feature for feature in _CPU_FEATURES if feature in here),
    )


def build_jobs() -> int:
    """How many compilers to run at once: the cores we may use, at about 2 GB each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores or 1, memory // (2 << 30)))


# -- CUDA -----------------------------------------------------------------------------------------


def find_cuda(environ: Mapping[str, str] = os.environ) -> Cuda | None:
    """A CUDA toolkit with nvcc, and an NCCL with header and library; None unless both."""
    homes = [environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    homes += [_toolkit_of(shutil.which("nvcc", path=environ.get("PATH"))), "/usr/local/cuda"]
    for home in (Path(h) for h in homes if h):
        release = _nvcc_release(home / "bin" / "nvcc")
        nccl = _find_nccl(home, environ)
        if release and nccl:
            return Cuda(home, release, *nccl)
    return None


def _toolkit_of(nvcc: str | None) -> str | None:
    """The toolkit behind the nvcc on PATH, which may be a script that lies elsewhere."""
    if nvcc is None:
        return None
    try:
        # It compiles nothing, and says where it would take its parts from.
        done = subprocess.run(
            [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    here = re.search(r"^#\$ _HERE_=(.+)$", done.stdout + done.stderr, re.MULTILINE)
    return str((Path(here.group(1)) if here else Path(nvcc).resolve().parent).parent)


def _nvcc_release(nvcc: Path) -> str | None:
    try:
        done = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+\.\d+)", done.stdout)
    return release.group(1) if release else None


def _find_nccl(cuda_home: Path, environ: Mapping[str, str]) -> tuple[Path, Path, str] | None:
    roots = [Path(environ[name]) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if name in environ]
    # torch's CUDA wheels bring NCCL, headers included, as a package of its own; using that one
    # means that torch and Horovod load the same library.
    site = Path(sysconfig.get_path("purelib"))
    roots += [site / "nvidia" / "nccl", cuda_home, Path("/usr")]
    for root in roots:
        header = root / "include" / "nccl.h"
        folders = (root / "lib", root / "lib64", root / "lib" / f"{platform.machine()}-linux-gnu")
        libraries = [lib for folder in folders for lib in sorted(folder.glob("libnccl.so*"))]
        if header.is_file() and libraries:
            text = header.read_text(errors="replace")
            parts = [
                re.search(rf"#define\s+NCCL_{part}\s+(\d+)", text)
                for part in ("MAJOR", "MINOR", "PATCH")
            ]
            version = ".".join(p.group(1) if p else "?" for p in parts)
            return header.parent, libraries[0], version
    return None
