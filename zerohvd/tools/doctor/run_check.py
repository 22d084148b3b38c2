"""Starts the ranks of `zerohvd doctor --run N` and reads what they found."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerohvd import versions
from zerohvd.launching import LaunchError, LaunchResult, launch
from zerohvd.tools.doctor.rank_check import CHECKS, DTYPES, offered
from zerohvd.tools.doctor.report import Cell, Grid, Line, Status

_HANG_FIX = (
    "run it again with OMPI_MCA_pml=ob1 and OMPI_MCA_btl=self,vader,tcp; if that works, the "
    "network layer that Open MPI chose by itself does not"
)
_WRONG_FIX = (
    f"rebuild Horovod for what is installed now: run `{versions.REINSTALL_HOROVOD}`; "
    "if it stays, please report it with the output of `zerohvd doctor --json --run 2`"
)


@dataclass(frozen=True)
class RunResult:
    lines: tuple[Line, ...]
    grid: Grid


def run(framework: str, ranks: int, timeout: float) -> RunResult:
    """Check every collective of one framework's Horovod with `ranks` ranks on this machine."""
    name = f"run {framework}"
    with tempfile.TemporaryDirectory(prefix="zerohvd-doctor-") as folder:
        argv = [sys.executable, "-m", "zerohvd.tools.doctor.rank_check", folder, framework]
        try:
            result = launch(ranks, argv, timeout=timeout)
        except LaunchError as error:
            line = Line(name, Status.FAIL, f"{ranks} ranks could not be started", str(error))
            return RunResult((line,), Grid(framework, ranks))
        records = [_read(Path(folder) / f"rank{rank}.jsonl") for rank in range(ranks)]
    return judge(framework, records, result)


def judge(framework: str, records: Sequence[Sequence[Any]], result: LaunchResult) -> RunResult:
    """From the records of all ranks, and the way the launch ended, to lines and a grid."""
    name, ranks = f"run {framework}", len(records)
    sizes = [record[0]["size"] for record in records if record]
    if len(sizes) < ranks or set(sizes) != {ranks}:
        grid = Grid(framework, ranks)
        return RunResult((_not_started(name, ranks, sizes, result),), grid)
    cells = tuple(_cells(framework, records))
    bad = [cell for cell in cells if cell.outcome in ("FAIL", "not run")]
    device = records[0][0]["device"]
    grid = Grid(f"{framework} on {device}", ranks, cells)
    if not bad and result.ok:
        done = sum(cell.outcome == "ok" for cell in cells)
        found = f"{ranks} ranks on {device}, {done} checks passed in {result.seconds:.0f} s"
        return RunResult((Line(name, Status.OK, found),), grid)
    if not bad:
        found = f"all checks passed, but the ranks ended badly: {result.explain(lines=3)}"
        return RunResult((Line(name, Status.FAIL, found, _WRONG_FIX),), grid)
    return RunResult(tuple(_failures(name, bad, result)), grid)


def _not_started(name: str, ranks: int, sizes: Sequence[int], result: LaunchResult) -> Line:
    if sizes and set(sizes) != {ranks}:
        found = f"{ranks} ranks were started, but Horovod says size {sizes[0]}: each is alone"
        fix = f"use the mpirun of the MPI that Horovod loads, not {result.command[0]}"
        return Line(name, Status.FAIL, found, fix)
    found = f"{ranks - len(sizes)} of {ranks} ranks never came up: {result.explain(lines=6)}"
    fix = f"see what they wrote; {_HANG_FIX}" if result.timed_out else f"see there; {_WRONG_FIX}"
    return Line(name, Status.FAIL, found, fix)


def _cells(framework: str, records: Sequence[Sequence[Any]]) -> Iterable[Cell]:
    by_rank = [{(e["check"], e["dtype"]): e for e in record[1:]} for record in records]
    process_set = ["process set"] if len(records) > 1 else []
    for check in [*CHECKS, *process_set, "barrier"]:
        for dtype in DTYPES if check != "barrier" else DTYPES[:1]:
            if not offered(framework, check, dtype):
                yield Cell(check, dtype, "-", "not offered by Horovod")
            else:
                yield _cell(check, dtype, [entries.get((check, dtype)) for entries in by_rank])


def _cell(check: str, dtype: str, entries: Sequence[Mapping[str, Any] | None]) -> Cell:
    details = []
    for rank, entry in enumerate(entries):
        if entry is not None and entry["outcome"] == "FAIL":
            details.append(f"rank {rank}: {entry['detail']}")
        elif entry is not None and entry["outcome"] == "begun":
            details.append(f"rank {rank}: did not come back")
    if details:
        return Cell(check, dtype, "FAIL", "; ".join(details))
    return Cell(check, dtype, "ok" if all(entries) else "not run")


def _failures(name: str, bad: Sequence[Cell], result: LaunchResult) -> Iterable[Line]:
    """One line per collective, so that a broken dtype does not fill the screen."""
    failed = [cell for cell in bad if cell.outcome == "FAIL"]
    for check in dict.fromkeys(cell.check for cell in failed):
        cells = [cell for cell in failed if cell.check == check]
        dtypes = ", ".join(cell.dtype for cell in cells)
        fix = _HANG_FIX if result.timed_out else _WRONG_FIX
        yield Line(f"{name}: {check}", Status.FAIL, f"{dtypes}: {cells[0].detail}", fix)
    skipped = len(bad) - len(failed)
    if skipped:
        ending = result.explain(lines=3)
        yield Line(name, Status.FAIL, f"{skipped} checks were not reached: {ending}", _WRONG_FIX)


def _read(record: Path) -> list[Any]:
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    return [json.loads(line) for line in lines]
