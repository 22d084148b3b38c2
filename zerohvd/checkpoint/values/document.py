"""Fields of a JSON document that may say anything, taken one by one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from zerohvd.checkpoint.errors import CorruptCheckpointError

# Sizes and offsets are 64-bit numbers in every file system and framework.
LARGEST = 2**63 - 1


def parse(text: bytes) -> Any:
    """The document, in which no object says anything twice.

    Raises:
        ValueError: It is no JSON, or nested so deeply that Python cannot read it.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it says {twice!r} twice")
    return found


class Field:
    """A value, and where it stands.

    Args:
        value: As JSON gave it.
        file: That says so.
        where: In the file, for errors.
    """

    def __init__(self, value: Any, file: Path, where: str = "") -> None:
        self.value, self.file, self.where = value, file, where

    def __getitem__(self, key: str) -> Field:
        where = f"{self.where}.{key}" if self.where else key
        if key not in self.object():
            raise CorruptCheckpointError(f"{self.file} lacks {where!r}")
        return Field(self.value[key], self.file, where)

    def wrong(self, expected: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.file}: {self.where or 'the document'} should be {expected}, not "
            f"{brief(self.value)}"
        )

    def object(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self.value

    def items(self) -> list[tuple[str, Field]]:
        return [(k, Field(v, self.file, f"{self.where}[{k!r}]")) for k, v in self.object().items()]

    def list(self, length: int | None = None) -> list[Field]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        if length is not None and len(self.value) != length:
            raise self.wrong(f"a list of {length}")
        return [Field(v, self.file, f"{self.where}[{i}]") for i, v in enumerate(self.value)]

    def integer(self, low: int = 0, high: int = LARGEST) -> int:
        if not is_integer(self.value) or not low <= self.value <= high:
            raise self.wrong(f"a whole number from {low} to {high}")
        return int(self.value)

    def text(self, pattern: str = r"[\s\S]*", expected: str = "a text") -> str:
        if not isinstance(self.value, str) or not re.fullmatch(pattern, self.value):
            raise self.wrong(expected)
        return self.value


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def brief(value: Any) -> str:
    """A value that may be of any size, for an error."""
    if isinstance(value, (dict, list)):
        return f"a {'dict' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
