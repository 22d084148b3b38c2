"""Charts as SVG, drawn by hand: nothing to install and nothing to load.

Their own unit is one pixel of a phone that is 360 pixels wide, so that texts can be read there; on
wider screens they grow with the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 8, 10, 28
# Told apart by people who do not see all colours, and on paper.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888")

Format = Callable[[float], str]


class Series(NamedTuple):
    """One line, or one layer of a stack."""

    name: str
    values: Sequence[float | None]
    colour: str
    dashed: bool = False


def line_chart(title: str, steps: Sequence[float], series: Sequence[Series], show: Format) -> str:
    """Lines over the steps."""
    known = [v for s in series for v in s.values if v is not None]
    plot = _Plot(steps, *_range(known), show)
    return _figure(title, plot.svg(title, [plot.line(s) for s in series]), series)


def stacked_chart(
    title: str,
    steps: Sequence[float],
    layers: Sequence[Series],
    show: Format,
    lines: Sequence[Series] = (),
    base: float = 10.0,
) -> str:
    """Layers on top of each other over the steps, and lines above them.

    Args:
        base: Of the units of the axis: 10, or 1024 for bytes.
    """
    count = len(steps)
    tops = [[0.0] * count]
    for layer in layers:
        below = tops[-1]
        tops.append([b + (v or 0.0) for b, v in zip(below, layer.values, strict=True)])
    highest = max([*tops[-1], *(v for s in lines for v in s.values if v is not None)])
    unit = base ** max(0, math.floor(math.log(highest or 1.0, base))) if base > 10 else 1.0
    plot = _Plot(steps, 0.0, 4 * unit * _nice(highest / unit / 4), show)
    drawn = [
        plot.area(bottom, top, layer.colour)
        for bottom, top, layer in zip(tops, tops[1:], layers, strict=False)
    ]
    drawn += [plot.line(s) for s in lines]
    return _figure(title, plot.svg(title, drawn), [*layers, *lines])


def heat_map(
    title: str,
    steps: Sequence[float],
    rows: Sequence[tuple[str, Sequence[float]]],
    show: Format,
) -> str:
    """One row per name; the darker a cell, the larger its value."""
    left, top = 92, 4
    height = max(9, min(24, 300 // max(1, len(rows))))
    width = (WIDTH - left - 4) / max(1, len(steps))
    highest = max([v for _, values in rows for v in values], default=0.0) or 1.0
    cells = []
    for r, (name, values) in enumerate(rows):
        y = top + r * height
        size = min(11, height)
        cells.append(f'<text x="0" y="{y + height / 2 + 4:.0f}" font-size="{size}">'
                     f"{escape(_short(name))}</text>")  # fmt: skip
        for c, value in enumerate(values):
            x = left + c * width
            told = escape(f"{name}, step {steps[c]:g}: {show(value)}")
            shade = round(value / highest, 3)
            cells.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width + 0.4:.1f}" height="{height - 1}" '
                f'fill="{COLOURS[1]}" fill-opacity="{shade}"><title>{told}</title></rect>'
            )
    bottom = top + len(rows) * height
    ends = ((left, "start", steps[0]), (WIDTH - 4, "end", steps[-1]))
    cells += [
        f'<text x="{x}" y="{bottom + 14}" text-anchor="{a}" class="axis">step {s:g}</text>'
        for x, a, s in ends
    ]
    frame = (
        f'<rect x="{left}" y="{top}" width="{WIDTH - left - 4}" height="{bottom - top}" '
        'class="frame"/>'
    )
    svg = _svg(title, bottom + 20, [frame, *cells])
    note = f"<p class='legend'>Darkest: {escape(show(highest))} per step.</p>"
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{note}</figure>"


class _Plot:
    """Axes, and how numbers become places."""

    def __init__(self, steps: Sequence[float], low: float, high: float, show: Format) -> None:
        self._steps, self._low, self._high, self._show = steps, low, high, show

    def _x(self, step: float) -> float:
        first, last = self._steps[0], self._steps[-1]
        share = 0.5 if first == last else (step - first) / (last - first)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        span = (self._high - self._low) or 1.0
        return HEIGHT - _BOTTOM - (value - self._low) / span * (HEIGHT - _TOP - _BOTTOM)

    def _places(self, values: Sequence[float]) -> list[str]:
        """Points; a single one becomes a short line, which can be seen."""
        found = [(self._x(s), self._y(v)) for s, v in zip(self._steps, values, strict=True)]
        if len(found) == 1:
            (x, y) = found[0]
            found = [(x - 20, y), (x + 20, y)]
        return [f"{x:.1f},{y:.1f}" for x, y in found]

    def line(self, series: Series) -> str:
        dash = ' stroke-dasharray="5 3"' if series.dashed else ""
        parts: list[list[str]] = [[]]
        for step, value in zip(self._steps, series.values, strict=True):
            if value is None:
                parts.append([])  # a gap, as where a loss is not finite
            else:
                parts[-1].append(f"{self._x(step):.1f},{self._y(value):.1f}")
        if len(self._steps) == 1 and series.values[0] is not None:
            parts = [self._places([series.values[0]])]
        return "".join(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{series.colour}" '
            f'stroke-width="1.8"{dash}/>'
            for points in parts
            if points
        )

    def area(self, bottom: Sequence[float], top: Sequence[float], colour: str) -> str:
        points = [*self._places(top), *reversed(self._places(bottom))]
        return f'<polygon points="{" ".join(points)}" fill="{colour}"/>'

    def svg(self, title: str, drawn: Sequence[str]) -> str:
        grid = []
        for i in range(5):
            value = self._low + i / 4 * (self._high - self._low)
            y, said = self._y(value), self._show(value) if value else "0"
            grid.append(
                f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                f'class="grid"/><text x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end" '
                f'class="axis">{escape(said)}</text>'
            )
        bottom = HEIGHT - _BOTTOM + 16
        ends = ((_LEFT, "start", self._steps[0]), (WIDTH - _RIGHT, "end", self._steps[-1]))
        grid += [
            f'<text x="{x}" y="{bottom}" text-anchor="{a}" class="axis">step {s:g}</text>'
            for x, a, s in ends
        ]
        return _svg(title, HEIGHT, [*drawn, *grid])


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _figure(title: str, svg: str, series: Sequence[Series]) -> str:
    keys = "".join(
        f'<span><i style="background:{s.colour}"></i>{escape(s.name)}</span>' for s in series
    )
    legend = f'<p class="legend">{keys}</p>' if len(series) > 1 else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{legend}</figure>"


def _short(name: str) -> str:
    return name if len(name) <= 15 else f"{name[:14]}…"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A little more than the values need; from 0 where that is not far."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if 0 <= low < 0.5 * high:
        low = 0.0
    step = _nice((high - low) / 4 or abs(high) / 4)
    start = math.floor(low / step) * step
    while start + 4 * step < high:
        step = _nice(1.01 * step)
        start = math.floor(low / step) * step
    return start, start + 4 * step


def _nice(value: float) -> float:
    """A round number that is not smaller."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    # The last one is for values that are rounded up to the next power.
    return next(unit * m for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 20) if unit * m >= value)
