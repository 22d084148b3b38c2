"""A trace of one rank that chrome://tracing and ui.perfetto.dev show: steps, waits, collectives.

Every rank writes files of its own, event by event, so that the trace of a run that was killed can
be read too. There are two, each for half of the allowed size: when one is full, the other begins
anew. So the latest events are kept, however long the run.
"""

from __future__ import annotations

import atexit
import heapq
import json
import os
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerohvd.communication.log import Record

VARIABLE = "ZEROHVD_TRACE"
LIMIT = 64 << 20  # bytes per rank
_BUFFERED = 1 << 16
_STEPS, _WAITS, _COLLECTIVES = 1, 2, 10  # rows of a rank; collectives that overlap have several
_BUCKET = re.compile(r"/(?:([su]\d+)/)?(b\d+)/(\w+)/(.+)$")


class Trace:
    """Writes what one rank does. A watcher of a `CommLog`.

    Args:
        folder: One for all ranks; made if it is not there.
        limit: Bytes that this rank may write.
    """

    def __init__(
        self, folder: str | os.PathLike[str], rank: int, host: str = "", limit: int = LIMIT
    ) -> None:
        self._folder, self._rank, self._host, self._half = Path(folder), rank, host, limit // 2
        self._folder.mkdir(parents=True, exist_ok=True)
        self._zero = time.time() - time.perf_counter()
        self._events: list[str] = []
        self._buffered = 0
        self._open: dict[str, tuple[float, Record]] = {}
        self._free: list[int] = []  # rows of collectives in which nothing is under way
        self._rows: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._file, self._written = 0, 0
        self._last: float | None = None
        self._steps = 1  # the first one begins nobody knows when
        for number in (0, 1):
            self._path(number).unlink(missing_ok=True)
        self._begin_file()

    def _path(self, number: int) -> Path:
        return self._folder / f"rank{self._rank:05d}.{number}.json"

    def _begin_file(self) -> None:
        """Begin with what a viewer needs to know of this rank."""
        name = f"rank {self._rank}" + (f" ({self._host})" if self._host else "")
        rows = {_STEPS: "steps", _WAITS: "waiting", _COLLECTIVES: "collectives"}
        meta: list[dict[str, Any]] = [
            {"name": "process_name", "args": {"name": name, "host": self._host}}
        ]
        meta += [{"name": "thread_name", "tid": t, "args": {"name": n}} for t, n in rows.items()]
        meta.append({"name": "process_sort_index", "args": {"sort_index": self._rank}})
        lines = [json.dumps({**m, "ph": "M", "pid": self._rank}) for m in meta]
        text = "[\n" + "".join(f"{line},\n" for line in lines)
        self._path(self._file).write_text(text, encoding="utf-8")
        self._written = len(text)

    # -- what happens ------------------------------------------------------------------------------

    def started(self, record: Record) -> None:
        self._open[record.name] = (time.perf_counter(), record)
        if record.name not in self._rows:
            self._rows[record.name] = self._free_row()

    def ended(self, name: str) -> None:
        if name not in self._open:
            name = name.rpartition("/")[0]  # one step of a collective that has two
        found = self._open.get(name)
        if found is not None:
            self.collective(found[1], found[0], time.perf_counter())

    def collective(self, record: Record, start: float, stop: float) -> None:
        """Note a collective that is over."""
        self._open.pop(record.name, None)
        row = self._rows.pop(record.name, None)
        row = self._free_row() if row is None else row
        heapq.heappush(self._free, row)
        args = {"op": record.op, "bytes": record.nbytes, "moved": record.moved}
        args |= {"dtype": record.dtype, "collective": record.name, **_parts(record.name)}
        self._add(_title(record.name, record.op), start, stop, _COLLECTIVES + row, record.op, args)

    def _free_row(self) -> int:
        return heapq.heappop(self._free) if self._free else len(self._rows)

    def waited(self, what: str, start: float, stop: float) -> None:
        count = self._counts[what] = self._counts.get(what, 0) + 1
        args = {"waits for": what, "n": count}
        self._add(_title(what, "wait"), start, stop, _WAITS, "wait", args)

    def span(self, name: str, start: float, stop: float, **args: Any) -> None:
        """Note a part of a step."""
        self._add(name, start, stop, _STEPS, "step", args)

    def step_ended(self, *_: Any) -> None:
        """Note a step that ends now and began where the last one ended."""
        now = time.perf_counter()
        if self._last is not None:
            self._steps += 1
            self.span(f"step {self._steps}", self._last, now)
        self._last = now

    def _add(
        self, name: str, start: float, stop: float, row: int, kind: str, args: dict[str, Any]
    ) -> None:
        event = {
            "name": name,
            "cat": kind,
            "ph": "X",
            "ts": round(1e6 * (start + self._zero), 1),
            "dur": round(1e6 * (stop - start), 1),
            "pid": self._rank,
            "tid": row,
            "args": args,
        }
        line = json.dumps(event)
        self._events.append(line)
        self._buffered += len(line) + 2
        if self._buffered > _BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory."""
        if not self._events:
            return
        if self._written + self._buffered > self._half:
            self._file = 1 - self._file
            self._begin_file()
        with self._path(self._file).open("a", encoding="utf-8") as file:
            file.write("".join(f"{line},\n" for line in self._events))
        self._written += self._buffered
        self._events, self._buffered = [], 0



_open: dict[tuple[int, str], Trace] = {}


def open_trace(folder: str | os.PathLike[str], rank: int, host: str = "") -> Trace:
    """The trace of this process in a folder: one for all of its optimizers."""
    which = os.getpid(), os.path.abspath(folder)
    if which not in _open:
        _open[which] = Trace(folder, rank, host)
        atexit.register(_open[which].flush)
    return _open[which]


def wanted_trace(environ: Mapping[str, str], rank: int, host: str = "") -> Trace | None:
    """The trace that the environment asks for, by ZEROHVD_TRACE=FOLDER."""
    folder = environ.get(VARIABLE, "")
    return open_trace(folder, rank, host) if folder else None


def _parts(name: str) -> Mapping[str, str]:
    """The section or unit, the bucket and the parameter that a collective's name speaks of."""
    found = _BUCKET.search(name)
    if found is None:
        return {}
    keys = ("unit", "bucket", "", "parameter")
    parts = zip(keys, found.groups(), strict=True)
    return {key: value for key, value in parts if key and value}


def _title(name: str, op: str) -> str:
    found = _BUCKET.search(name)
    if found is not None:
        return f"{found[3]} {found[4]}"
    return name if " " in name else f"{op} {name.rpartition('/')[2]}"


# -- all ranks -------------------------------------------------------------------------------------


def merge(folder: str | os.PathLike[str], ranks: Iterable[int] | None = None) -> dict[str, Any]:
    """The traces of all ranks in a folder as one, for chrome://tracing or ui.perfetto.dev.

    Clocks of different hosts differ: their ranks are moved so that they come out of the waits for
    the same collectives at the same time.

    Args:
        ranks: Only these.

    Raises:
        ValueError: The folder has no traces.
    """
    wanted = None if ranks is None else set(ranks)
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(Path(folder).glob("rank*.[01].json")):
        rank = int(path.name[4:].split(".")[0])
        if wanted is None or rank in wanted:
            by_rank.setdefault(rank, []).extend(_read(path))
    if not by_rank:
        raise ValueError(
            f"{os.fspath(folder)!r} has no traces (rank00000.0.json, ...). Write some with "
            f"zero.Monitor(opt, trace={os.fspath(folder)!r}) or {VARIABLE}={os.fspath(folder)}"
        )
    _align(by_rank)
    metadata: dict[str, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for found in by_rank.values():
        for event in found:
            if event["ph"] == "M":
                metadata[json.dumps(event, sort_keys=True)] = event
            else:
                events.append(event)
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": [*metadata.values(), *events], "displayTimeUnit": "ms"}


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file; a last line that was not written to its end is left out."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line.strip().rstrip(","))
        except ValueError:
            continue
        if isinstance(event, dict) and "ph" in event:
            yield event


def _align(by_rank: Mapping[int, Sequence[dict[str, Any]]]) -> None:
    first = min(by_rank)
    ends, host = _ends(by_rank[first]), _host(by_rank[first])
    for rank, events in by_rank.items():
        mine = _ends(events)
        common = ends.keys() & mine.keys()
        if rank == first or _host(events) == host or not common:
            continue
        offset = statistics.median(mine[key] - ends[key] for key in common)
        for event in events:
            if "ts" in event:
                event["ts"] = round(event["ts"] - offset, 1)


def _ends(events: Iterable[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """When this rank came out of each wait."""
    return {
        (e["args"]["waits for"], e["args"]["n"]): e["ts"] + e["dur"]
        for e in events
        if e.get("cat") == "wait"
    }


def _host(events: Iterable[dict[str, Any]]) -> str:
    names = (e["args"].get("host", "") for e in events if e["name"] == "process_name")
    return str(next(names, ""))
