"""The page: one file with everything in it, for screens, phones and paper."""

from __future__ import annotations

import datetime
import statistics
from collections import Counter
from collections.abc import Sequence
from html import escape

from zerohvd.memory import format_bytes
from zerohvd.planning.sizes import show_bytes, show_seconds
from zerohvd.tools.reporter.charts import COLOURS, Series, heat_map, line_chart, stacked_chart
from zerohvd.tools.reporter.records import Record, column, thinned

_POINTS = 240  # more cannot be told apart on a page
_CELLS = 60
_ROWS = 64  # ranks in one picture; of more, those that were behind most
_KINDS = ("params", "grads", "optimizer", "master", "buffers")
_PARTS = (("compute", COLOURS[0]), ("communication", COLOURS[1]), ("update", COLOURS[2]))

_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --soft: #60646c; --line: #d9dde2;
  --paper: #fff; --tile: #f4f6f8 }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaed; --soft: #a0a6ae; --line: #3a3f46;
  --paper: #16181b; --tile: #202327 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; background: var(--paper);
  color: var(--text); font: 16px/1.45 system-ui, sans-serif }
h1 { font-size: 1.4rem; margin: 0 0 .2rem }
.soft { color: var(--soft); margin: 0 0 1rem }
.tiles { display: grid; gap: .6rem; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)) }
.tiles div { background: var(--tile); border-radius: .5rem; padding: .55rem .75rem }
.tiles b { display: block; font-size: 1.15rem; overflow-wrap: anywhere }
.tiles span { color: var(--soft); font-size: .85rem }
.charts { display: grid; gap: 1.4rem; margin: 1.4rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)) }
figure { margin: 0; break-inside: avoid }
figcaption { font-weight: 600; margin-bottom: .3rem }
svg { width: 100%; height: auto; display: block }
svg text { fill: var(--text); font-family: inherit }
svg .axis { font-size: 10.5px; fill: var(--soft) }
svg .grid { stroke: var(--text); stroke-opacity: .13 }
svg .frame { fill: none; stroke: var(--line) }
.legend { margin: .2rem 0 0; font-size: .85rem; color: var(--soft); display: flex;
  flex-wrap: wrap; gap: .15rem .9rem }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .35em }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
td { white-space: nowrap }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
h2 { font-size: 1.05rem; margin: 1.4rem 0 .3rem }
@media print { :root { --text: #000; --soft: #444; --line: #bbb; --paper: #fff; --tile: #fff }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact }
  body { max-width: none; padding: 0; font-size: 11pt }
  .tiles div { border: 1px solid var(--line) }
  .charts { grid-template-columns: 1fr 1fr; gap: .8rem } }
"""


def make_page(records: Sequence[Record], name: str) -> str:
    """The page of a run.

    Args:
        name: Of the run, for its heading.
    """
    shown = thinned(records, _POINTS)
    charts = [c for c in (_loss(shown), _times(shown), _slow(records), _memory(shown)) if c]
    charts += [c for c in (_single(shown, *what) for what in _SINGLES) if c]
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head>\n<body>"
        f"<h1>{escape(name)}</h1>{_subtitle(records)}{_tiles(records)}"
        f'<div class="charts">\n{chr(10).join(charts)}\n</div>'
        f"{_ranks_table(records)}{_bytes_table(records[-1])}</body></html>\n"
    )


_SINGLES = (
    ("samples_per_second", "Samples per second, all ranks"),
    ("grad_norm", "Norm of the gradients"),
    ("loss_scale", "Loss scale"),
)


def _subtitle(records: Sequence[Record]) -> str:
    last = records[-1]
    ranks = len(last.get("ranks/compute") or [0])
    hosts = len(set(last.get("hosts") or [])) or 1
    parts = [f"{ranks} rank{'s' * (ranks != 1)} on {hosts} host{'s' * (hosts != 1)}"]
    times = [r["wall_time"] for r in (records[0], last) if r.get("wall_time")]
    if len(times) == 2:
        began, ended = (datetime.datetime.fromtimestamp(t) for t in times)
        parts.append(f"{began:%Y-%m-%d %H:%M} to {ended:%Y-%m-%d %H:%M}")
    return f'<p class="soft">{" · ".join(parts)}</p>'


def _tiles(records: Sequence[Record]) -> str:
    last = records[-1]
    step = statistics.median(r["time/step"] for r in records)
    waiting = statistics.median(r["time/communication"] / (r["time/step"] or 1) for r in records)
    tiles = [("steps", f"{last['step']:,}"), ("median step", show_seconds(step))]
    tiles.append(("of it waiting", f"{100 * waiting:.0f} %"))
    if last.get("samples_per_second"):
        tiles.append(("samples per second", f"{last['samples_per_second']:,.4g}"))
    if last.get("loss") is not None:
        tiles.append(("loss", f"{last['loss']:.4g}"))
    tiles.append(("held, rank 0", format_bytes(last.get("memory/total", 0))))
    tiles.append(("peak of a process", format_bytes(max(r.get("memory/peak", 0) for r in records))))
    if any("loss_scale" in r for r in records):
        tiles.append(("skipped steps", f"{last.get('skipped_total', 0)}"))
    named = Counter(str(r["slowest"]).rpartition(" +")[0] for r in records if r.get("slowest"))
    if named:
        (who, times), *_ = named.most_common(1)
        tiles.append((f"slowest in {100 * times / len(records):.0f} % of the run", who))
    else:
        tiles.append(("slowest rank", "none stands out"))
    cells = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in tiles)
    return f'<div class="tiles">{cells}</div>'


def _steps(records: Sequence[Record]) -> list[float]:
    return [float(r["step"]) for r in records]


def _loss(records: Sequence[Record]) -> str:
    return _single(records, "loss", "Loss, mean over the ranks")


def _single(records: Sequence[Record], key: str, title: str) -> str:
    values = column(records, key)
    if all(v is None for v in values):
        return ""
    series = [Series(key, values, COLOURS[0])]
    return line_chart(title, _steps(records), series, _short_number)


def _times(records: Sequence[Record]) -> str:
    names = {"communication": "exposed communication"}
    layers = [
        Series(names.get(part, part), column(records, f"time/{part}"), colour)
        for part, colour in _PARTS
    ]
    return stacked_chart("Time of a step, rank 0", _steps(records), layers, show_seconds)


def _memory(records: Sequence[Record]) -> str:
    found = [(kind, column(records, f"memory/{kind}")) for kind in _KINDS]
    layers = [
        Series(kind, values, colour)
        for (kind, values), colour in zip(found, COLOURS, strict=False)
        if any(values)
    ]
    if not layers:
        return ""
    peak = Series("peak of a process", column(records, "memory/peak"), COLOURS[6], dashed=True)
    return stacked_chart("Memory by kind, rank 0", _steps(records), layers, _size, [peak], 1024.0)


def _slow(records: Sequence[Record]) -> str:
    """How far each rank was behind the others."""
    shown = thinned([r for r in records if r.get("ranks/behind")], _CELLS)
    if not shown or len(shown[-1]["ranks/behind"]) < 2:
        return ""
    count = len(shown[-1]["ranks/behind"])
    shown = [r for r in shown if len(r["ranks/behind"]) == count]
    hosts = shown[-1].get("hosts") or [""] * count
    rows = [
        (f"{rank} {hosts[rank]}".strip(), [r["ranks/behind"][rank] for r in shown])
        for rank in range(count)
    ]
    title = "Slow ranks: how far each is behind"
    if count > _ROWS:
        rows = sorted(rows, key=lambda row: -sum(row[1]))[:_ROWS]
        title = f"Slow ranks: the {_ROWS} of {count} that are behind most"
    return heat_map(title, _steps(shown), rows, show_seconds)


def _ranks_table(records: Sequence[Record]) -> str:
    last = records[-1]
    parts = [last.get(f"ranks/{part}") or [] for part, _ in _PARTS]
    late = last.get("ranks/behind") or []
    held = last.get("ranks/memory") or []
    if len(late) < 2:
        return ""
    hosts = last.get("hosts") or [""] * len(late)
    order = sorted(range(len(late)), key=lambda rank: -late[rank])[:_ROWS]
    head = ("rank", "compute", "exposed communication", "update", "behind", "holds")
    rows = [
        (
            f"{r} {hosts[r]}",
            *(show_seconds(part[r]) for part in [*parts, late]),
            format_bytes(held[r]),
        )
        for r in sorted(order)
    ]
    return _table(f"Ranks, steps up to {last['step']}", head, rows)


def _bytes_table(record: Record) -> str:
    moved = {k.partition("/")[2]: v for k, v in record.items() if k.startswith("bytes/")}
    rows = [(op, format_bytes(count)) for op, count in moved.items()]
    return _table("Moved by rank 0 in one step", ("collective", "sent"), rows)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    table = f"<table><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table>"
    return f'<h2>{escape(title)}</h2><div class="scroll">{table}</div>'


def _size(count: float) -> str:
    return show_bytes(count, binary=True).replace(".0 ", " ")


def _short_number(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.4g}"
