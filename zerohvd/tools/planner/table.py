"""A plan as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerohvd.planning.footprint import KINDS
from zerohvd.planning.plan import Plan, Row
from zerohvd.planning.sizes import show_seconds

UNKNOWN = "not measured"


def show(plan: Plan, console: Console) -> None:
    """Print a plan: a row per stage and number of ranks, what to know, what to choose."""
    kinds = [k for k in KINDS if _is_needed(plan, k)]
    title = f"{plan.workload.name}, {plan.workload.optimizer.name}: bytes per rank"
    if plan.limit is not None:
        title += f", of {plan.show(plan.limit)}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("ranks", justify="right")
    table.add_column("stage", justify="right")
    for name in [*_titles(kinds), "moved"]:
        table.add_column(name, justify="right", no_wrap=True)
    if plan.network is not None:
        table.add_column("step", justify="right", no_wrap=True)
    if plan.limit is not None:
        table.add_column("fits", no_wrap=True)
    chosen, before = plan.chosen(), None
    for row in plan.rows:
        ranks = "" if row.size == before else str(row.size)
        if before is not None and ranks:
            table.add_row()
        table.add_row(ranks, *_cells(plan, row, kinds), style="bold" if row is chosen else None)
        before = row.size
    console.print(table)
    console.print()
    for note in plan.notes:
        console.print(Text(note, style="dim"))
    console.print(Text(plan.recommendation[:1].upper() + plan.recommendation[1:]))


def _is_needed(plan: Plan, kind: str) -> bool:
    """Masters where there are any; what was not measured is said of activations."""
    return kind not in ("master", "temporary") or any(getattr(r.memory, kind) for r in plan.rows)


def _titles(kinds: Sequence[str]) -> list[str]:
    """The sum of what ZeRO shards stands behind its parts."""
    found = list(kinds)
    found.insert(found.index("buffers"), "= states")
    return [*found, "peak"]


def _cells(plan: Plan, row: Row, kinds: Sequence[str]) -> list[str]:
    cells = [str(row.stage)]
    for title in _titles(kinds):
        value = getattr(row.memory, title.removeprefix("= "))
        cells.append(UNKNOWN if value is None else plan.show(value) if value else "-")
    if not row.memory.complete:
        cells[-1] = f"> {cells[-1]}"
    cells.append(plan.show(row.moved) if row.moved else "-")
    if row.time is not None:
        cells.append(f"{show_seconds(row.time.least)} .. {show_seconds(row.time.most)}")
    if row.fits is not None:
        cells.append(("yes" if row.memory.complete else "perhaps") if row.fits else "no")
    return cells
