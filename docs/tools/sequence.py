"""Mermaid's sequence diagrams as SVG, drawn when the site is built.

Mermaid itself is a script that browsers fetch from elsewhere. The sources stay in Markdown, where
code hosts draw them. What is understood: participants, messages (`->>`, `-->>`) and `Note over`.
"""

from __future__ import annotations

import html
import re
from typing import NamedTuple

CHAR, LINE, ROW, PAD = 6.6, 15, 30, 14  # pixels: a letter's width, heights of a line and a row
SIDE = 190  # the most that a self-message's text takes beside its line


class Message(NamedTuple):
    source: int
    target: int
    text: str
    dashed: bool
    note: bool


def parse(text: str) -> tuple[list[str], list[Message]]:
    """The participants' labels, and what happens between them; raises ValueError."""
    names: dict[str, str] = {}
    messages = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line == "sequenceDiagram":
            continue
        if found := re.fullmatch(r"participant (\w+)(?: as (.+))?", line):
            names[found[1]] = found[2] or found[1]
        elif found := re.fullmatch(r"Note over (\w+): (.+)", line):
            at = list(names).index(found[1])
            messages.append(Message(at, at, found[2], False, True))
        elif found := re.fullmatch(r"(\w+)(--?>>)(\w+): (.+)", line):
            ends = [list(names).index(found[i]) for i in (1, 3)]
            messages.append(Message(*ends, found[4], found[2] == "-->>", False))
        else:
            raise ValueError(f"this line of a diagram is not understood: {line}")
    return list(names.values()), messages


def wrap(text: str, width: float) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and (len(lines[-1]) + 1 + len(word)) * CHAR > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def columns(labels: list[str], messages: list[Message]) -> list[float]:
    """Where each participant's line is: far enough from the one before for what is written."""
    at = [70.0]
    for right in range(1, len(labels)):
        gap = 150.0
        for m in messages:
            low, high = sorted((m.source, m.target))
            if high == low == right - 1 and not m.note:
                gap = max(gap, min(len(m.text) * CHAR, SIDE) + 50)
            elif high == right and low == right - 1:
                gap = max(gap, min(len(m.text) * CHAR, 230) + 24)
        at.append(at[-1] + gap)
    return at


def draw(text: str) -> str:
    """The SVG of a sequence diagram."""
    labels, messages = parse(text)
    at = columns(labels, messages)
    names = [wrap(label, 112) for label in labels]
    top = max(map(len, names)) * LINE + 12
    parts, y = [], top + ROW
    for m in messages:
        drawn, height = _message(m, at, y)
        parts.append(drawn)
        y += height
    last = [m for m in messages if m.source == m.target == len(at) - 1]
    width = at[-1] + (SIDE + 60 if last else 80)
    lines = "".join(
        f'<line x1="{x:g}" y1="{top}" x2="{x:g}" y2="{y:g}" stroke-opacity=".35"/>' for x in at
    )
    boxes = "".join(_box(x, 0, 122, top, name) for x, name in zip(at, names, strict=True))
    return (
        f'<div class="diagram"><svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" '
        f'viewBox="0 0 {width:g} {y + 4:g}" font-family="sans-serif" font-size="12" '
        'stroke="currentColor" fill="none" role="img">'
        f"{lines}{boxes}{''.join(parts)}</svg></div>"
    )


def _words(lines: list[str], x: float, y: float, anchor: str) -> str:
    return "".join(
        f'<text x="{x:g}" y="{y + i * LINE:g}" text-anchor="{anchor}" stroke="none" '
        f'fill="currentColor">{html.escape(line)}</text>'
        for i, line in enumerate(lines)
    )


def _box(x: float, y: float, width: float, height: float, lines: list[str]) -> str:
    start = y + (height - len(lines) * LINE) / 2 + 12
    return (
        f'<rect x="{x - width / 2:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
        f'style="fill: var(--md-code-bg-color, #eee)" stroke-opacity=".5"/>'
        f'{_words(lines, x, start, "middle")}'
    )


def _message(m: Message, at: list[float], y: float) -> tuple[str, float]:
    """A message or note that begins at `y`, and how much height it takes."""
    a, b = at[m.source], at[m.target]
    if m.note:
        lines = wrap(m.text, 200)
        height = len(lines) * LINE + 8
        return _box(a, y - 12, 216, height, lines), height + PAD
    dash = ' stroke-dasharray="5 4"' if m.dashed else ""
    if a == b:
        lines = wrap(m.text, SIDE)
        loop = f'<path d="M{a:g} {y:g} h26 v14 h-22"{dash}/>{_head(a, y + 14, -1)}'
        height = max(len(lines) * LINE, 14) + PAD
        return loop + _words(lines, a + 34, y + 8, "start"), height
    lines = wrap(m.text, abs(b - a) - 12)
    foot = y + (len(lines) - 1) * LINE + 6
    arrow = f'<line x1="{a:g}" y1="{foot:g}" x2="{b:g}" y2="{foot:g}"{dash}/>'
    sign = 1 if b > a else -1
    words = _words(lines, (a + b) / 2, y, "middle")
    return words + arrow + _head(b, foot, sign), foot - y + ROW - 4


def _head(x: float, y: float, sign: int) -> str:
    back = x - 8 * sign
    return f'<path d="M{x:g} {y:g} L{back:g} {y - 4:g} V{y + 4:g} Z" fill="currentColor"/>'
