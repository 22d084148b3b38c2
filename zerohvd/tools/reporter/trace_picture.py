"""The last steps of a merged trace as a picture, for those who cannot open a viewer."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from zerohvd.tools.reporter.charts import COLOURS

_WIDTH, _LEFT, _ROW, _TOP = 1000, 110, 17, 26
_OF_KIND = {
    "step": "#b8c0c8",
    "wait": COLOURS[1],
    "reducescatter": COLOURS[0],
    "allgather": COLOURS[2],
    "allreduce": COLOURS[5],
    "broadcast": COLOURS[3],
}
_CHARACTER = 6.1  # pixels
_MOST = 5000  # rectangles: more cannot be told apart

Event = dict[str, Any]


def draw_trace(trace: dict[str, Any], steps: int = 2) -> str:
    """An SVG of the last steps of the first rank, and what the other ranks did meanwhile.

    Args:
        trace: As `zerohvd.monitoring.trace.merge` returns it.

    Raises:
        ValueError: It has no steps.
    """
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == _PROCESS}
    whole = [e for e in events if e["cat"] == "step" and e["name"].startswith("step ")]
    if not whole:
        raise ValueError("the trace has no whole step")
    shown = [e for e in whole if e["pid"] == min(e["pid"] for e in whole)][-steps:]
    start, stop = shown[0]["ts"], shown[-1]["ts"] + shown[-1]["dur"]
    events = [e for e in events if e["ts"] < stop and e["ts"] + e["dur"] > start][-_MOST:]
    rows = sorted({(e["pid"], e["tid"]) for e in events})
    places = {row: _TOP + i * _ROW + 8 * _ranks_before(rows, i) for i, row in enumerate(rows)}
    scale = (_WIDTH - _LEFT - 6) / (stop - start)
    parts = [_box(e, places[e["pid"], e["tid"]], start, stop, scale) for e in events]
    for pid in sorted({pid for pid, _ in rows}):
        first = min(y for (p, _), y in places.items() if p == pid)
        parts.append(f'<text x="0" y="{first + 12}">{escape(names.get(pid, str(pid)))}</text>')
    bottom = max(places.values()) + _ROW + 14
    parts.append(_axis(start, stop, scale, bottom))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 6}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="#808890">{_legend(events)}'
        f"{''.join(parts)}</svg>\n"
    )


_PROCESS = "process_name"


def _ranks_before(rows: Sequence[tuple[int, int]], i: int) -> int:
    return len({pid for pid, _ in rows[: i + 1]}) - 1


def _box(event: Event, y: float, start: float, stop: float, scale: float) -> str:
    begin, end = max(event["ts"], start), min(event["ts"] + event["dur"], stop)
    x, width = _LEFT + (begin - start) * scale, max(0.6, (end - begin) * scale)
    colour = _OF_KIND.get(event["cat"], "#888888")
    told = escape(f"{event['name']}: {event['dur'] / 1e3:.2f} ms")
    box = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 3}" fill="{colour}">'
        f"<title>{told}</title></rect>"
    )
    room = int((width - 4) / _CHARACTER)
    if room < 4:
        return box
    # The colour says which operation it is.
    name = event["args"].get("parameter") or event["name"]
    name = name if len(name) <= room else f"{name[: room - 1]}…"
    ink = "#1c2024" if event["cat"] == "step" else "#ffffff"
    return f'{box}<text x="{x + 3:.1f}" y="{y + 11}" fill="{ink}">{escape(name)}</text>'


def _axis(start: float, stop: float, scale: float, y: float) -> str:
    marks = []
    for i in range(5):
        at = (stop - start) * i / 4
        anchor = "end" if i == 4 else "start" if i == 0 else "middle"
        x = _LEFT + at * scale
        marks.append(f'<text x="{x:.0f}" y="{y}" text-anchor="{anchor}">{at / 1e3:.0f} ms</text>')
    return "".join(marks)


def _legend(events: Sequence[Event]) -> str:
    found, x = [], float(_LEFT)
    for kind in dict.fromkeys(e["cat"] for e in events):
        name = "waiting" if kind == "wait" else kind
        colour = _OF_KIND.get(kind, "#888888")
        found.append(
            f'<rect x="{x:.0f}" y="3" width="10" height="10" fill="{colour}"/>'
            f'<text x="{x + 14:.0f}" y="12">{escape(name)}</text>'
        )
        x += 30 + _CHARACTER * len(name)
    return "".join(found)
