"""Bars with whiskers as SVG: what the README and RESULTS.md show."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

OURS, THEIRS, TEXT = "#228833", "#8899aa", "#808890"
WIDTH, LEFT, RIGHT, ROW, TOP = 640, 190, 130, 28, 40


def bars(
    path: Path,
    title: str,
    values: Mapping[str, Sequence[float]],
    show: Callable[[float], str],
    ours: Callable[[str], bool],
) -> None:
    """Draw the median of each name, and a line from its lowest to its highest value."""
    most = max(max(found) for found in values.values())
    scale = (WIDTH - LEFT - RIGHT) / most
    parts = [f'<text x="0" y="18" font-size="15" font-weight="600">{escape(title)}</text>']
    for row, (name, found) in enumerate(values.items()):
        y, middle = TOP + row * ROW, statistics.median(found)
        colour = OURS if ours(name) else THEIRS
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{LEFT}" y="{y + 2}" width="{middle * scale:.1f}" height="18" rx="2" '
            f'fill="{colour}"/>'
            f'<text x="{LEFT + max(found) * scale + 8:.1f}" y="{y + 15}">'
            f"{escape(show(middle))}</text>"
        )
        if len(found) > 1:
            low, high = (LEFT + scale * v for v in (min(found), max(found)))
            parts.append(
                f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 11}" y2="{y + 11}" '
                f'stroke="{TEXT}" stroke-width="2"/>'
            )
    height = TOP + len(values) * ROW + 6
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" font-family="system-ui, sans-serif" font-size="13" fill="{TEXT}">'
        f"{''.join(parts)}</svg>\n"
    )
