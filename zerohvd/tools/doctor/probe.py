"""Imports parts of a stack one after the other and notes what each turned out to be.

    python -m zerohvd.tools.doctor.probe RECORD torch horovod.torch world

Each part is announced in the file RECORD before it is touched and described there afterwards, so
that the reader knows what was under way if this process crashes.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# libmpi.so.40, libmpich.so.12, libmpi_cray.so.12, and wheels' libmpi-1a2b3c.so
_LIBMPI = re.compile(r"libmpi(ch)?(_cray|_intel|_ibm|_gnu_[^/]*)?(-\w+)?\.so")
_LIBNCCL = re.compile(r"libnccl\.so")


def main(argv: list[str]) -> None:
    record, *parts = argv
    with open(record, "w", encoding="utf-8", buffering=1) as out:
        for part in parts:
            out.write(json.dumps({"part": part, "outcome": "begun"}) + "\n")
            try:
                data = {"outcome": "ok", "data": _LOOKERS[part]()}
            except BaseException as error:  # an import may even call sys.exit
                data = {"outcome": "error", "detail": f"{type(error).__name__}: {error}"}
            out.write(json.dumps({"part": part, **data}) + "\n")


def _torch() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU"
    found = {"version": torch.__version__, "kind": kind, "gpus": gpus}
    if kind == "CUDA":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found |= {"cuda": torch.version.cuda, "nccl": nccl}
        if not gpus:
            found["driver"] = _why(torch.cuda.init)
    return found


def _why(start: Callable[[], object]) -> str:
    """The first sentence of the error that a call raises; empty if it does not."""
    try:
        start()
    except Exception as error:
        return str(error).strip().splitlines()[0].partition(". ")[0]
    return ""


def _tensorflow() -> dict[str, Any]:
    tf = importlib.import_module("tensorflow")
    build = dict(tf.sysconfig.get_build_info())
    kind = "ROCm" if build.get("is_rocm_build") else "CUDA" if build.get("is_cuda_build") else "CPU"
    gpus = len(tf.config.list_physical_devices("GPU"))
    return {
        "version": tf.__version__, "kind": kind, "gpus": gpus, "cuda": build.get("cuda_version")
    }  # fmt: skip


def _keras() -> dict[str, Any]:
    keras = importlib.import_module("keras")
    return {"version": keras.__version__, "backend": keras.config.backend()}


def _horovod(framework: str) -> dict[str, Any]:
    hvd = importlib.import_module(f"horovod.{framework}")
    names = ("mpi", "gloo", "nccl", "cuda", "rocm", "ccl", "ddl")
    built = [name for name in names if getattr(hvd, f"{name}_built")()]
    return {"built": built, "libmpi": loaded_libmpi(), "libnccl": loaded(_LIBNCCL)}


def _mpi4py() -> dict[str, Any]:
    mpi4py = importlib.import_module("mpi4py")
    # Looking must not start MPI: without a launcher that may abort the process.
    mpi4py.rc.initialize = False
    mpi = importlib.import_module("mpi4py.MPI")
    library = mpi.Get_library_version().strip("\0 \n").splitlines()[0]
    return {"version": mpi4py.__version__, "library": library, "libmpi": loaded_libmpi()}


def _world() -> dict[str, Any]:
    """Start Horovod, in whichever framework was imported before."""
    name = next(m for m in ("horovod.torch", "horovod.tensorflow") if m in sys.modules)
    hvd = sys.modules[name]
    hvd.init()
    found = {"size": hvd.size(), "rank": hvd.rank(), "mpi": hvd.mpi_enabled()}
    hvd.shutdown()
    return found


def loaded_libmpi() -> list[str]:
    """The MPI libraries in this process, as real paths."""
    return loaded(_LIBMPI)


def loaded(name: re.Pattern[str]) -> list[str]:
    """The libraries in this process whose names match, as real paths."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = {path for line in maps for path in line.split(maxsplit=5)[5:]}
    return sorted({str(Path(f).resolve()) for f in files if name.match(Path(f).name)})


_LOOKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "keras": _keras,
    "horovod.torch": lambda: _horovod("torch"),
    "horovod.tensorflow": lambda: _horovod("tensorflow"),
    "mpi4py": _mpi4py,
    "world": _world,
}

if __name__ == "__main__":
    main(sys.argv[1:])
