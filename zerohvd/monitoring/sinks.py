"""Where records go: the console, files, and any object with `log(dict)`."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from zerohvd.memory import format_bytes
from zerohvd.monitoring.tensorboard import TensorBoardSink

TENSORBOARD = "tensorboard:"
_EXPECTED = (
    '"console", a path that ends with .jsonl or .csv, "tensorboard:FOLDER", or an object with '
    "log(dict), such as a wandb run"
)


class Sink(Protocol):
    """Takes records; a run of Weights & Biases is one."""

    def log(self, record: dict[str, Any], /) -> Any: ...


class ConsoleSink:
    """One line per record on stderr.

    Where a progress bar has the last line of the terminal (tqdm, Keras' own), the line is written
    above it: tqdm knows how, and for any other bar the line begins and ends with a line feed.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream

    def log(self, record: dict[str, Any]) -> None:
        write = _above_bars(self._stream or sys.stderr)
        write(line_of(record))


def _above_bars(stream: Any) -> Callable[[str], None]:
    # Only if the user has loaded it: then it may have bars on the screen.
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is not None:
        return lambda line: tqdm.write(line, file=stream)

    def plainly(line: str) -> None:
        # A bar such as Keras' ends without a line feed, and is drawn again after a "\r".
        start = "\n" if getattr(stream, "isatty", lambda: False)() else ""
        stream.write(f"{start}{line}\n")
        stream.flush()

    return plainly


def line_of(record: Mapping[str, Any]) -> str:
    """A record as one line of text."""
    ms = {k: 1e3 * record[f"time/{k}"] for k in ("step", "compute", "communication", "update")}
    parts = [
        f"step {record['step']}",
        f"{ms['step']:.0f} ms (compute {ms['compute']:.0f}, comm {ms['communication']:.0f}, "
        f"update {ms['update']:.0f})",
    ]
    if "loss" in record:
        parts.insert(1, f"loss {record['loss']:.4g}")
    if "samples_per_second" in record:
        parts.append(f"{record['samples_per_second']:.4g} samples/s")
    if "grad_norm" in record:
        parts.append(f"|grad| {record['grad_norm']:.3g}")
    if "loss_scale" in record:
        parts.append(f"scale {record['loss_scale']:g}")
    if record.get("skipped"):
        parts.append(f"skipped {record['skipped']}")
    parts.append(f"moved {format_bytes(record['bytes/total'])}")
    parts.append(f"held {format_bytes(record['memory/total'])}")
    parts.append(f"peak {format_bytes(record['memory/peak'])}")
    if record.get("slowest"):
        parts.append(f"slow: {record['slowest']}")
    return "zerohvd: " + " | ".join(parts)


class JsonLinesSink:
    """A file with one JSON object per line; what `zerohvd report` reads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = _made(path)

    def log(self, record: dict[str, Any]) -> None:
        # Opened anew: whole lines, also when the run is killed.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(record)) + "\n")


def _finite(value: Any) -> Any:
    """Without NaN and infinities, which JSON does not know: None in their place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value


class CsvSink:
    """A table with one row per record. Its columns are those of the first record; lists, and what
    later records have besides, are left out."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = _made(path)
        self._columns: list[str] | None = None
        if self._path.exists() and self._path.stat().st_size:
            with self._path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file))

    def log(self, record: dict[str, Any]) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            if self._columns is None:
                self._columns = [k for k, v in record.items() if not isinstance(v, list)]
                csv.writer(file).writerow(self._columns)
            csv.writer(file).writerow([record.get(c, "") for c in self._columns])


def _made(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    found.parent.mkdir(parents=True, exist_ok=True)
    return found


def open_sinks(wanted: Any, *, write: bool = True) -> list[Sink]:
    """The sinks that a user has named.

    Args:
        write: This rank does. The others only check the names: a mistake is one of all ranks.

    Raises:
        TypeError, ValueError: Something is neither a sink nor the name of one.
    """
    if isinstance(wanted, (str, os.PathLike)) or not isinstance(wanted, Sequence):
        wanted = [wanted]
    makers = [_maker(each) for each in wanted]
    return [sink for make in makers if (sink := make()) is not None] if write else []


def _maker(wanted: Any) -> Callable[[], Sink | None]:
    if isinstance(wanted, (str, os.PathLike)):
        name = os.fspath(wanted)
        if name == "console":
            return ConsoleSink
        if name.startswith(TENSORBOARD) and len(name) > len(TENSORBOARD):
            return lambda: TensorBoardSink(name.removeprefix(TENSORBOARD))
        if name.endswith(".jsonl"):
            return lambda: JsonLinesSink(name)
        if name.endswith(".csv"):
            return lambda: CsvSink(name)
        raise ValueError(f"to: expected {_EXPECTED}, got {name!r}")
    # None: what a rank that has no run of Weights & Biases passes.
    if wanted is not None and not callable(getattr(wanted, "log", None)):
        raise TypeError(f"to: expected {_EXPECTED}, got {wanted!r}")
    return lambda: wanted
