"""Lines about GPUs: what frameworks were built with, what they load, what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zerohvd import versions
from zerohvd.tools.doctor.probes import Findings
from zerohvd.tools.doctor.report import Line, Status


def gpu_lines(findings: Findings) -> Iterator[Line]:
    """Nothing where no framework is a CUDA build."""
    for framework in ("torch", "tensorflow"):
        finding = findings.get(framework)
        if finding is None or not finding.ok or finding.data.get("kind") != "CUDA":
            continue
        yield Line(f"CUDA of {framework}", Status.OK, _built_with(finding.data))
        if not finding.data.get("gpus"):
            yield _no_gpu_line(framework, str(finding.data.get("driver", "")))
        horovod = findings.get(f"horovod.{framework}")
        if horovod is not None and horovod.ok:
            yield _nccl_line(framework, horovod.data, _nccl(finding.data))


def _built_with(data: Mapping[str, Any]) -> str:
    return f"{data.get('cuda') or 'of unknown version'}, NCCL {_nccl(data) or 'none of its own'}"


def _nccl(data: Mapping[str, Any]) -> str:
    return str(data.get("nccl") or "")


def _no_gpu_line(framework: str, reason: str) -> Line:
    found = f"{framework} finds no GPU" + (f": {reason}" if reason else "")
    fix = "run this on a node with GPUs, where `nvidia-smi` lists them; CPUs are used otherwise"
    return Line("NVIDIA driver", Status.WARN, found, fix)


def _nccl_line(framework: str, horovod: Mapping[str, Any], of_framework: str) -> Line:
    name = f"NCCL of horovod.{framework}"
    fix = f"run `{versions.REINSTALL_HOROVOD}`"
    if "nccl" not in horovod["built"]:
        found = f"none, while {framework} is for CUDA: tensors would travel through the host"
        return Line(name, Status.WARN, found, f"{fix} where nvcc is on PATH")
    loaded = list(horovod.get("libnccl", ()))
    if len(loaded) > 1:
        found = f"two in one process: {', '.join(loaded)}"
        return Line(name, Status.FAIL, found, f"{fix}, with one of them on LD_LIBRARY_PATH")
    where = loaded[0] if loaded else "linked into Horovod"
    return Line(name, Status.OK, f"{where} ({framework} was built with {of_framework or 'none'})")
