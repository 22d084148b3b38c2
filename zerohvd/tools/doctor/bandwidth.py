"""Latency and bandwidth of each collective: what `zerohvd plan` predicts step times from.

`zerohvd doctor --run N --bandwidth` starts it on this machine. On a cluster, start it yourself:

    mpirun -np 16 -H host1:8,host2:8 python -m zerohvd.tools.doctor.bandwidth torch network.json
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from zerohvd.communication.collectives import Collectives, HorovodCollectives
from zerohvd.config import MIB
from zerohvd.launching import LaunchError, launch
from zerohvd.planning.network import CYCLE_SECONDS, OPS, Link, Network, fit, load
from zerohvd.planning.sizes import show_bytes, show_seconds
from zerohvd.tools.adapters import load_adapter
from zerohvd.tools.doctor.rank_check import ADAPTERS, Framework
from zerohvd.tools.doctor.report import Line, Status

SIZES = (1 << 14, 1 << 18, 2 * MIB, 8 * MIB, 16 * MIB)  # bytes of the whole buffer
REPEATS = 5
_FIX = "see what the ranks wrote, and run `zerohvd doctor --run 2` without --bandwidth first"


class Point(NamedTuple):
    """One measurement: the median of several collectives, less Horovod's cycle."""

    nbytes: int
    ranks: int
    seconds: float


# -- on each rank ----------------------------------------------------------------------------------


def measure(ranks: Collectives, framework: Framework, where: str) -> dict[str, list[Point]]:
    """Time every collective among these ranks; all of them call it."""
    found: dict[str, list[Point]] = {}
    for op in OPS:
        for nbytes in SIZES:
            name = f"doctor/{where}/{op}/{nbytes}"
            act = _call(ranks, framework, op, nbytes, name)
            act()
            times = []
            for _ in range(REPEATS):
                ranks.barrier(name=f"{name}/ready")
                begun = time.perf_counter()
                act()
                times.append(time.perf_counter() - begun)
            slowest = max(ranks.allgather_object(statistics.median(times), name=f"{name}/times"))
            # Alone, a collective waits for the next cycle of Horovod's thread; plans count that
            # for themselves.
            found.setdefault(op, []).append(
                Point(nbytes, ranks.size, max(1e-6, slowest - cycle_seconds(os.environ)))
            )
    return found


def _call(
    ranks: Collectives, framework: Framework, op: str, nbytes: int, name: str
) -> Callable[[], Any]:
    elements = max(ranks.size, nbytes // 4 // ranks.size * ranks.size)
    if op == "allgather":
        elements //= ranks.size
    x = framework.make(np.ones((elements, 1)), "float32")
    if op == "alltoall":
        splits = [elements // ranks.size] * ranks.size
        return lambda: ranks.alltoall(x, splits, name=name)
    if op in ("allreduce", "reducescatter"):
        return lambda: getattr(ranks, op)(x, "sum", name=name)
    return lambda: getattr(ranks, op)(x, name=name)


def cycle_seconds(environ: Mapping[str, str]) -> float:
    """Horovod's cycle, as it is set."""
    try:
        return float(environ.get("HOROVOD_CYCLE_TIME", "")) * 1e-3
    except ValueError:
        return CYCLE_SECONDS


def document(
    points: Mapping[str, Mapping[str, Sequence[Point]]], *, device: str, hosts: int
) -> dict[str, Any]:
    """What is stored: the links between all ranks, and those within and across hosts.

    On CPUs zerohvd sums gradients after an alltoall, so that is what its reducescatter costs.
    """
    world = dict(points["all"])
    if device.lower().startswith("cpu"):
        world["reducescatter"] = world["alltoall"]
    size = next(iter(world.values()))[0].ranks
    name = f"measured on {platform.node()}, {size} ranks on {hosts} host{'s' * (hosts > 1)}"
    links = {op: _link(op, found) for op, found in world.items()}
    return {
        **Network(links=links, cycle=cycle_seconds(os.environ), name=name).as_dict(),
        "device": device,
        "hosts": hosts,
        "parts": {
            where: {op: vars(_link(op, found)) for op, found in ops.items()}
            for where, ops in points.items()
        },
        "points": {where: {op: list(f) for op, f in ops.items()} for where, ops in points.items()},
    }


def _link(op: str, points: Sequence[Point]) -> Link:
    # An allreduce is two passes over the link.
    return fit([(p.nbytes, p.ranks, p.seconds / (2 if op == "allreduce" else 1)) for p in points])


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2 or argv[0] not in ADAPTERS:
        print(f"error: give a framework ({', '.join(ADAPTERS)}) and a file", file=sys.stderr)
        return 2
    name, out = argv
    # Sets of ranks are made below, when it is known which hosts there are.
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    hvd = importlib.import_module(f"horovod.{name}")
    arrays = load_adapter(ADAPTERS[name]).arrays
    hvd.init()
    framework = Framework(name, hvd)
    if hvd.size() == 1:
        print("error: bandwidth needs at least two ranks", file=sys.stderr)
        return 1
    sets = _sets(hvd, HorovodCollectives(hvd, arrays))
    points = {
        where: measure(HorovodCollectives(hvd, arrays, members), framework, where)
        for where, members in sets.items()
    }
    if hvd.rank() == 0:
        found = document(points, device=framework.device, hosts=hvd.cross_size())
        store(found, Path(out))
    return 0


def _sets(hvd: ModuleType, world: Collectives) -> dict[str, Any]:
    """All ranks; and the set within this host and that across hosts which this rank is in."""
    found: dict[str, Any] = {"all": None}
    groups = cut(world.allgather_object(platform.node(), name="doctor/hosts"))
    for where, members in groups:
        # Every rank registers every set, in one order.
        members = [int(rank) for rank in members]
        registered = hvd.add_process_set(members)
        if hvd.rank() in members:
            found[where] = registered
    return found


def cut(hosts: Sequence[str]) -> list[tuple[str, list[int]]]:
    """The ranks of each host ("within"), and the n-th ranks of all hosts ("across").

    Args:
        hosts: The host of each rank. There is nothing to cut with one host, with one rank on each,
            or with different numbers of ranks.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    local = {len(members) for members in ranks.values()}
    if len(ranks) == 1 or local != {max(local)} or local == {1}:
        return []
    within = [("within", members) for members in ranks.values()]
    across = [("across", list(nth)) for nth in zip(*ranks.values(), strict=True)]
    return [*within, *across]


def store(found: Mapping[str, Any], path: Path) -> None:
    """Write the document, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=".network-", delete=False, encoding="utf-8"
    ) as file:
        json.dump(found, file, indent=1)
    os.replace(file.name, path)


# -- started by the doctor -------------------------------------------------------------------------


def run(framework: str, ranks: int, path: Path, timeout: float) -> list[Line]:
    """Measure with `ranks` ranks on this machine, store it, and say what was found."""
    name = f"bandwidth {framework}"
    argv = [sys.executable, "-m", "zerohvd.tools.doctor.bandwidth", framework, str(path)]
    try:
        result = launch(ranks, argv, timeout=timeout)
    except LaunchError as error:
        return [Line(name, Status.FAIL, f"{ranks} ranks could not be started", str(error))]
    if not result.ok:
        return [Line(name, Status.FAIL, result.explain(lines=6), _FIX)]
    net = load(path)
    lines = [
        Line(
            f"{name}: {op}",
            Status.INFO,
            f"{show_seconds(link.alpha)} per rank, {show_bytes(link.beta)}/s",
        )
        for op, link in net.links.items()
    ]
    return [*lines, Line(name, Status.OK, f"{net.name}; stored in {path}, for `zerohvd plan`")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
