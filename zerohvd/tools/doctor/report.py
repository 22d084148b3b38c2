"""The lines of a report, as tables for people and as one JSON document for machines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Status(str, Enum):
    """How a line stands; only `FAIL` makes the doctor exit with 1."""

    OK = "ok"
    INFO = "info"  # neither good nor bad, such as a framework that is not installed
    WARN = "warn"
    FAIL = "fail"


_STYLES = {Status.OK: "green", Status.INFO: "dim", Status.WARN: "yellow", Status.FAIL: "bold red"}


@dataclass(frozen=True)
class Line:
    """One finding: what was looked at, what was found, and what to do about it."""

    name: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status is Status.FAIL and not self.fix:
            raise ValueError(f"a failing line must say how to fix it: {self.name}")


@dataclass(frozen=True)
class Cell:
    """One check of one collective with one dtype.

    Attributes:
        outcome: `ok`, `FAIL`, or `not run`, or `-` where Horovod does not offer it.
        detail: What went wrong, and on which rank.
    """

    check: str
    dtype: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class Grid:
    """The results of one framework's run: checks down, dtypes across."""

    framework: str
    ranks: int
    cells: tuple[Cell, ...] = ()


@dataclass(frozen=True)
class Report:
    lines: tuple[Line, ...]
    grids: tuple[Grid, ...] = ()

    @property
    def ok(self) -> bool:
        return all(line.status is not Status.FAIL for line in self.lines)

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def to_json(self, **facts: Any) -> str:
        """One document; `facts` are added to it as they are."""
        document = {
            "ok": self.ok,
            **facts,
            "lines": [dataclasses.asdict(line) for line in self.lines],
            "runs": [dataclasses.asdict(grid) for grid in self.grids],
        }
        return json.dumps(document, indent=2)

    def print(self, console: Console) -> None:
        console.print(_lines_table(self.lines))
        for grid in self.grids:
            if grid.cells:
                console.print()
                console.print(_grid_table(grid))
        console.print(self._verdict())

    def _verdict(self) -> Text:
        fails = sum(line.status is Status.FAIL for line in self.lines)
        warns = sum(line.status is Status.WARN for line in self.lines)
        if fails:
            text = f"{fails} problem{'s' * (fails > 1)} to fix"
            return Text(text, style=_STYLES[Status.FAIL])
        if warns:
            text = f"Nothing fails, {warns} warning{'s' * (warns > 1)}"
            return Text(text, style=_STYLES[Status.WARN])
        return Text("All good", style=_STYLES[Status.OK])


def _lines_table(lines: Iterable[Line]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for line in lines:
        found = Text(line.found)
        if line.fix:
            found.append(f"\n→ {line.fix}", style="cyan")
        table.add_row(Text(line.status.value, style=_STYLES[line.status]), line.name, found)
    return table


def _grid_table(grid: Grid) -> Table:
    checks = _in_order(cell.check for cell in grid.cells)
    dtypes = _in_order(cell.dtype for cell in grid.cells)
    found = {(cell.check, cell.dtype): cell.outcome for cell in grid.cells}
    table = Table(title=f"{grid.framework}, {grid.ranks} ranks", title_justify="left", box=None)
    table.add_column("")
    for dtype in dtypes:
        table.add_column(dtype, no_wrap=True)
    for check in checks:
        outcomes = [found.get((check, dtype), "") for dtype in dtypes]
        table.add_row(check, *(Text(o, style=_outcome_style(o)) for o in outcomes))
    return table


def _outcome_style(outcome: str) -> str:
    return {"ok": "green", "FAIL": "bold red"}.get(outcome, "dim")


def _in_order(names: Iterable[str]) -> Sequence[str]:
    return list(dict.fromkeys(names))
