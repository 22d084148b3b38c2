"""From Horovod's source on PyPI to a wheel in the cache.

Nothing in the user's environment changes here: build tools go into the build folder. What today's
torch, TensorFlow, CMake and Python need that Horovod 0.28.1 could not know is of two kinds: a
compiler wrapper (flags that Horovod's CMakeLists would strip) and a few edits of its CMake files.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from zerohvd.tools.builder.cache import Cache
from zerohvd.tools.builder.environment import Compiler
from zerohvd.tools.builder.errors import BuilderError
from zerohvd.tools.builder.plan import HOROVOD_VERSION, SDIST_SHA256, Plan, build_environment
from zerohvd.tools.builder.steps import StepFailed, Steps

BUILD_STEPS = 3
# In the wheel, so that an installed Horovod can tell what it was built for.
RECORD = "zerohvd_build.py"
# Frameworks are found by importing them: no isolation. pip's cache does not tell builds apart.
_NO_SURPRISES = ("--no-build-isolation", "--no-cache-dir", "--no-deps")
_TOOLS = ("setuptools>=68,<90", "wheel", "packaging")


class Edit(NamedTuple):
    """One replacement in one file of the source."""

    file: str
    old: str
    new: str


_EDITS = (
    # distutils is gone since Python 3.12.
    Edit(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
    ),
    # It takes the folder it is built in for a regular expression: a "+" in its path, and the
    # libraries end up outside of the package.
    Edit(
        "cmake/Utilities.cmake",
        'string(REGEX REPLACE "${PROJECT_SOURCE_DIR}(/)?" "" SUB_FOLDER '
        '"${CMAKE_CURRENT_SOURCE_DIR}")',
        'file(RELATIVE_PATH SUB_FOLDER "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")',
    ),
)
# For CPU builds only: with a CUDA build of torch and any nvcc on the machine, Horovod would switch
# to CUDA by itself and then need all of the toolkit.
_CPU_EDITS = (
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        "(torch.version.cuda is not None) and (CUDA_HOME is not None)",
        "False",
    ),
)
# C++11, with which nvcc 13 cannot read the headers of g++ 12.
_GPU_EDITS = (
    Edit(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 17)",
    ),
)


def pip(*arguments: str) -> list[str]:
    """A pip command for this environment."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def build_wheel(plan: Plan, cache: Cache, steps: Steps, *, force: bool = False) -> Path:
    """The wheel for `plan`: from the cache, or built now.

    Raises:
        StepFailed: With the end of the log.
    """

    def waiting(holder: str) -> None:
        steps.note(f"Another process ({holder}) is building the same Horovod; waiting for it.")

    with cache.lock(plan.key, waiting):
        wheel = cache.wheel(plan.key)
        if wheel is not None and not force:
            # Another process has made it since this one looked.
            return wheel
        folder = cache.build_folder(plan.key)
        if force:
            shutil.rmtree(folder)
            folder.mkdir()
        source = folder / "src"
        continued = source.exists()
        _prepare(plan, cache, steps, folder)
        try:
            built = _compile(plan, cache, steps, folder)
        except StepFailed:
            if not continued:
                raise
            # What an earlier run left behind may be the reason (half an object file).
            steps.note("The build continued an interrupted one; starting it from the beginning.")
            shutil.rmtree(source)
            _unpack(plan, _sdist(cache), source)
            built = _compile(plan, cache, steps, folder)
        stored = cache.store(plan.key, built)
        shutil.rmtree(folder, ignore_errors=True)
        return stored


def _prepare(plan: Plan, cache: Cache, steps: Steps, folder: Path) -> None:
    """Everything the compile step needs, in `folder`."""
    sdist = _sdist(cache)
    if _sha256(sdist) == SDIST_SHA256:
        steps.say(f"Source of Horovod {plan.horovod}", "is here")
    else:
        _download(cache, steps)
    tools = folder / "tools"
    wanted = [*_TOOLS, *(["cmake"] if plan.cmake.path is None else [])]
    done = folder / "tools.done"
    if done.exists() and done.read_text() == " ".join(wanted):
        steps.say("Build tools", "are here")
    else:
        shutil.rmtree(tools, ignore_errors=True)
        steps.run(
            "Build tools (for the time of the build)",
            pip("install", "--target", str(tools), *wanted),
            log=cache.log(plan.key, "tools"),
            hint="Is the package index reachable? (`pip download setuptools` must work.)",
        )
        done.write_text(" ".join(wanted))
    if not (folder / "src").exists():
        _unpack(plan, sdist, folder / "src")


def _compile(plan: Plan, cache: Cache, steps: Steps, folder: Path) -> Path:
    wrapper = write_wrapper(folder / "cxx", plan.compiler)
    # The launcher script in the wheel of cmake needs its package on the path; this is the program.
    cmake = plan.cmake.path or folder / "tools" / "cmake" / "data" / "bin" / "cmake"
    env = build_environment(
        plan, wrapper=wrapper, cmake=cmake, tools=folder / "tools", environ=os.environ
    )
    if plan.cuda:
        env |= _nccl_variables(plan, folder)
    out = folder / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    names = " and ".join(f"{f.module} {f.version}" for f in plan.frameworks)
    steps.run(
        f"Building Horovod {plan.horovod} for {names} "
        f"(some minutes; {plan.jobs} compiler{'s' if plan.jobs > 1 else ''} at once)",
        pip("wheel", "-v", *_NO_SURPRISES, "-w", str(out), str(folder / "src")),
        log=cache.log(plan.key, "build"),
        env=env,
        hint=(
            "The log has the whole build. If the compiler was killed, it ran out of memory: "
            "try again with fewer cores, e.g. `taskset -c 0 zerohvd horovod install`."
        ),
    )
    wheels = list(out.glob("horovod-*.whl"))
    if len(wheels) != 1:
        raise BuilderError(f"The build ended well but left {len(wheels)} wheels in {out}.")
    check_wheel(plan, wheels[0], cache.log(plan.key, "build"))
    return wheels[0]


def check_wheel(plan: Plan, wheel: Path, log: Path) -> None:
    """Raise BuilderError unless the wheel holds a library per framework.

    Horovod's build can end well without one, and such a wheel must not get into the cache.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for framework in plan.frameworks:
        start = f"horovod/{framework.module}/mpi_lib"
        if not any(name.startswith(start) and name.endswith(".so") for name in names):
            raise BuilderError(
                f"The build ended well, but the wheel has no library for {framework.module}.\n"
                f"The log {log} should say why; please report it."
            )


def write_wrapper(path: Path, compiler: Compiler) -> Path:
    """A compiler that adds what Horovod's CMakeLists.txt would strip or cannot say.

    - C++17: Horovod asks for 14, torch's headers need 17. The last -std wins.
    - No debug information: the wheel has 2 MB instead of 35.
    - horovod/tensorflow/xla_mpi_ops.cc (XLA on GPUs) includes headers that TensorFlow no longer
      ships; without TENSORFLOW_VERSION it compiles to nothing.
    """
    script = f"""#!/bin/sh
extra="-std=c++17 -g0"
for argument in "$@"; do
  case "$argument" in
    */xla_mpi_ops.cc) extra="$extra -UTENSORFLOW_VERSION" ;;
  esac
done
exec {shlex.join(compiler.command)} "$@" $extra
"""
    path.write_text(script)
    path.chmod(0o755)
    return path


def _sdist(cache: Cache) -> Path:
    return cache.sdist_folder() / f"horovod-{HOROVOD_VERSION}.tar.gz"


def _download(cache: Cache, steps: Steps) -> None:
    sdist = _sdist(cache)
    partial = sdist.parent / f"partial-{os.getpid()}"
    what = ("-d", str(partial), f"horovod=={HOROVOD_VERSION}")
    try:
        steps.run(
            f"Source of Horovod {HOROVOD_VERSION}",
            pip("download", "--no-binary", "horovod", "--no-cache-dir", "--no-deps", *what),
            log=sdist.parent / "download.log",
            hint="Is the package index reachable?",
        )
        found = _sha256(partial / sdist.name)
        if found != SDIST_SHA256:
            raise BuilderError(
                f"The source of Horovod {HOROVOD_VERSION} from your package index is not the one "
                f"published on PyPI: its SHA-256 is {found}, expected {SDIST_SHA256}.\n"
                "Ask whoever runs the index, or use another one (`pip config list` shows which)."
            )
        os.replace(partial / sdist.name, sdist)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def _unpack(plan: Plan, sdist: Path, target: Path) -> None:
    partial = target.with_name("unpacking")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(partial, filter="data")
        else:  # Python 3.10 and 3.11 before their security releases of 2023
            archive.extractall(partial)
    root = partial / f"horovod-{plan.horovod}"
    for edit in (*_EDITS, *(_GPU_EDITS if plan.cuda else _CPU_EDITS)):
        apply_edit(root, edit)
    record = f"BUILD = {plan.ingredients!r}\nKEY = {plan.key!r}\n"
    (root / "horovod" / RECORD).write_text(record)
    os.replace(root, target)
    shutil.rmtree(partial)


def apply_edit(root: Path, edit: Edit) -> None:
    path = root / edit.file
    text = path.read_text()
    if edit.old not in text:
        raise BuilderError(f"Horovod's {edit.file} is not as expected: no {edit.old!r} in it.")
    path.write_text(text.replace(edit.old, edit.new))


def _nccl_variables(plan: Plan, folder: Path) -> dict[str, str]:
    """Point Horovod's CMake to the NCCL of the plan."""
    assert plan.cuda is not None
    # PyPI's NCCL has only libnccl.so.2, while CMake looks for libnccl.so.
    links = folder / "nccl"
    links.mkdir(exist_ok=True)
    link = links / "libnccl.so"
    link.unlink(missing_ok=True)
    link.symlink_to(plan.cuda.nccl_library)
    return {
        "HOROVOD_NCCL_INCLUDE": str(plan.cuda.nccl_include),
        "HOROVOD_NCCL_LIB": str(links),
        "HOROVOD_NCCL_LINK": "SHARED",
    }
