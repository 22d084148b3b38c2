"""Checkpoints whose seals are right and whose manifests lie: every field, in every way.

A fuzzer that leaves nothing to chance: each place of a manifest is replaced by each of a list of
values, removed, renamed, repeated. Tests that have no time for all of them take every n-th.
"""

from __future__ import annotations

import copy
import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DEEP = "@@deep@@"  # stands for 10^5 lists in each other, which json.dumps cannot write
_NAN, _INF = float("nan"), float("inf")


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


VALUES: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**62, 2**63, -(2**70), 10**30, 0.5, _NAN, _INF, 1e300,
    "", "x", "../x", "/etc/passwd", "\ud800", "\0", "float64", "int32", "int64", "complex64", "nan",
    [], [1], [-1, 4], [0], [2**40, 2**40], {}, {"a": 1}, [[]], [None], ["", None], ["float32", [1]],
    ["float32", {"!float": "nan"}], ["object", 1],
    {"!tuple": [1]}, {"!tuple": 5}, {"!array": "none", "of": "numpy"}, {"!array": [1]},
    {"!set": [[]]},
    {"!scalar": ["V99999999999999", 1]}, {"!scalar": ["float32"]}, {"!items": [[[], 1]]},
    {"!items": [1]}, {"!bytes": "%"}, {"!complex": [1, 2, 3]}, {"!float": "x"}, {"!what": 1},
    {"!float": "nan"}, {"!float": "inf"}, _nested(300), _nested(900), DEEP,
]  # fmt: skip


class Lie(NamedTuple):
    """A changed manifest, and what was changed."""

    what: str
    document: dict[str, Any]


def read(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "manifest.json").read_bytes())
    del document["checksum"]
    return document


def seal(document: dict[str, Any]) -> bytes:
    """Valid to the last bit of its checksum; not by the functions that are tested."""
    text = json.dumps(document).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    body = text.removeprefix("{").encode()
    return b'{"checksum": "crc32:%08x",\n' % zlib.crc32(body) + body


def write(folder: Path, document: dict[str, Any]) -> None:
    (folder / "manifest.json").write_bytes(seal(document))


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else ()
    inside = enumerate(value) if isinstance(value, list) else inside
    for key, part in inside:
        yield from _places(part, (*path, key))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def _ways(container: Any, key: Any) -> Iterator[tuple[str, Any]]:
    """(how, what to do to a copy of the container)."""
    for value in VALUES:
        yield f"= {str(value)[:40]!r}", lambda c, v=value: c.__setitem__(key, v)
    yield "removed", lambda c: c.__delitem__(key)
    old = container[key]
    if isinstance(container, dict):
        yield "renamed", lambda c: c.__setitem__(f"{key}x", c.pop(key))
        yield "twice", lambda c: c.__setitem__(f"{key}x", copy.deepcopy(c[key]))
    else:
        yield "twice", lambda c: c.insert(key, copy.deepcopy(c[key]))
        yield "last", lambda c: c.append(c.pop(key))
    if isinstance(old, int):
        for step in (-1, 1, 4, old):
            yield f"{step:+}", lambda c, s=step: c.__setitem__(key, old + s)
    if isinstance(old, list):
        yield "reversed", lambda c: c.__setitem__(key, old[::-1])
        yield "doubled", lambda c: c.__setitem__(key, old + old)


def lies(document: dict[str, Any], every: int = 1, first: int = 0) -> Iterator[Lie]:
    """All of them, or every n-th from the given one on."""
    number = 0
    for path in list(_places(document)):
        for how, act in _ways(_at(document, path[:-1]), path[-1]):
            number += 1
            if number % every == first % every:
                changed = copy.deepcopy(document)
                act(_at(changed, path[:-1]))
                yield Lie(f"{'.'.join(map(str, path))} {how}", changed)
