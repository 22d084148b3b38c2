"""Cores and memory that a job on this machine can really use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zerohvd.cores import YIELD, parse_quota


@dataclass(frozen=True)
class Machine:
    """What this process may use.

    Attributes:
        cores: Cores of the machine.
        usable_cores: Cores this process is allowed on; fewer where it was bound or confined.
        memory_bytes: Memory of the machine or of its container, whichever is smaller.
    """

    cores: int
    usable_cores: int
    memory_bytes: int | None

    def __str__(self) -> str:
        text = f"{self.cores} cores"
        if self.usable_cores < self.cores:
            text += f" ({self.usable_cores} for this process)"
        if self.memory_bytes is not None:
            text += f", {self.memory_bytes / 2**30:.1f} GiB of memory"
        return text

    def crowded_by(self, ranks_here: int, *, bound: bool) -> bool:
        """Whether ranks and Horovod's background threads outnumber the cores.

        Args:
            ranks_here: Ranks on this machine.
            bound: A launcher gave this rank its cores, so that `usable_cores` is its share; else
                the ranks would all share what this process may use.
        """
        if not bound:
            return ranks_here * 2 > self.usable_cores
        return self.usable_cores < 2 or ranks_here * 2 > self.cores


def look() -> Machine:
    cores = os.cpu_count() or 1
    quota = parse_quota(_read("/sys/fs/cgroup/cpu.max"))
    usable = min(len(os.sched_getaffinity(0)), quota or cores)
    limits = [_physical_memory(_read("/proc/meminfo")), _number(_read("/sys/fs/cgroup/memory.max"))]
    known = [limit for limit in limits if limit is not None]
    return Machine(cores=cores, usable_cores=usable, memory_bytes=min(known, default=None))


def yields_when_idle(environ: Mapping[str, str]) -> bool:
    """Whether Open MPI was told to give the core away while it waits."""
    return environ.get(YIELD, "").lower() in ("1", "true", "yes", "t", "y")


def _physical_memory(meminfo: str) -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, flags=re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
