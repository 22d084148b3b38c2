"""A plan as stacked bars against the memory line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerohvd.planning.footprint import KINDS
from zerohvd.planning.plan import Plan

_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377", "#ee6677", "#bbbbbb", "#dddddd")


def draw(plan: Plan, path: Path) -> None:
    """Write a picture of the plan; its suffix says which kind.

    Raises:
        ValueError: matplotlib is missing or cannot write such a file.
    """
    figure, axes = _figure(len(plan.rows))
    base, unit = (1024**3, "GiB") if plan.binary else (10**9, "GB")
    if max(row.memory.peak for row in plan.rows) < base:
        base, unit = (1024**2, "MiB") if plan.binary else (10**6, "MB")
    places = list(range(len(plan.rows)))
    bottoms = [0.0] * len(places)
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        heights = [(getattr(row.memory, kind) or 0) / base for row in plan.rows]
        if any(heights):
            axes.bar(places, heights, 0.7, bottom=bottoms, label=kind, color=colour)
            bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    peaks = [row.memory.peak / base for row in plan.rows]
    axes.plot(places, peaks, "k_", markersize=18, label="peak of a step")
    if plan.limit is not None:
        label = f"memory, {plan.show(plan.limit)}"
        axes.axhline(plan.limit / base, color="red", linestyle="--", label=label)
    names = [f"stage {row.stage}\n{row.size} ranks" for row in plan.rows]
    axes.set_xticks(places, names, fontsize=8)
    axes.set_ylabel(f"{unit} per rank")
    axes.set_title(f"{plan.workload.name}, {plan.workload.optimizer.name}", fontsize=10)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise ValueError(f"{str(path)!r} cannot be written: {error}") from error


def _figure(bars: int) -> tuple[Any, Any]:
    try:
        # Not pyplot, which would look for a screen.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"--plot needs matplotlib ({error}): pip install 'zerohvd[plot]'"
        ) from error
    figure = Figure(figsize=(max(5.0, 1.2 + 0.85 * bars), 4.5), layout="constrained")
    return figure, figure.add_subplot()
