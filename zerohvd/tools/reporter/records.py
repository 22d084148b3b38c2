"""The records of a run, as `zero.Monitor(opt, to="run.jsonl")` has written them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
_NEEDED = ("step", "time/step", "time/compute", "time/communication", "time/update")


def read_records(path: Path) -> list[Record]:
    """The records of a file; of a run that was resumed, those of a step once, the latest.

    Raises:
        ValueError: The file has no records.
        OSError: It cannot be read.
    """
    found: list[Record] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break  # a run that was killed while it wrote
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        missing = [key for key in _NEEDED if not isinstance(record, dict) or key not in record]
        if missing:
            raise ValueError(
                f"{path}, line {number}: not a record of zero.Monitor, it has no {missing[0]!r}. "
                'Such files are written by zero.Monitor(opt, to="run.jsonl")'
            )
        while found and found[-1]["step"] >= record["step"]:
            found.pop()  # the run was resumed from before this step
        found.append(record)
    if not found:
        raise ValueError(f"{path} has no records: no rank has come to the end of `every` steps")
    return found


def column(records: Sequence[Record], key: str) -> list[float | None]:
    """One number of every record; None where a record has none."""
    values = [record.get(key) for record in records]
    return [float(v) if isinstance(v, (int, float)) else None for v in values]


def thinned(records: Sequence[Record], most: int) -> list[Record]:
    """At most so many records, evenly chosen, with the last one."""
    if len(records) <= most:
        return list(records)
    return [records[round(i * (len(records) - 1) / (most - 1))] for i in range(most)]
