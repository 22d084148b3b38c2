"""The bytes of a checkpoint: names of files, headers of shards, the manifest's first line.

docs/checkpoint-format.md is the specification; what is written here stays readable.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerohvd.checkpoint.errors import CheckpointError, CorruptCheckpointError
from zerohvd.checkpoint.values.document import brief, parse

FORMAT = "zerohvd-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
# In the metadata of a consolidated file: JSON with what a manifest's state says about names.
ABOUT = "zerohvd"

# A part is checked in pieces of this size, so that a rank which needs little reads little.
CHUNK_BYTES = 1 << 20

# dtype -> its name in safetensors, and how many of those make one element.
SAFETENSORS = {
    "float64": ("F64", 1),
    "float32": ("F32", 1),
    "float16": ("F16", 1),
    "bfloat16": ("BF16", 1),
    "int64": ("I64", 1),
    "int32": ("I32", 1),
    "int16": ("I16", 1),
    "int8": ("I8", 1),
    "uint64": ("U64", 1),
    "uint32": ("U32", 1),
    "uint16": ("U16", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("F32", 2),
    "complex128": ("F64", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
_WORD = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
_WORD |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
DTYPE_OF = {word: dtype for dtype, (word, count) in SAFETENSORS.items() if count == 1}


def itemsize(dtype: str) -> int:
    if dtype not in SAFETENSORS:
        raise ValueError(f"dtype {dtype!r} cannot be stored; known are {', '.join(SAFETENSORS)}")
    word, count = SAFETENSORS[dtype]
    return _WORD[word] * count


def absolute(path: str | os.PathLike[str]) -> Path:
    """`path`, whatever the working directory is going to be when a thread writes there."""
    if not os.fspath(path):
        raise ValueError("the path of a checkpoint is empty: give the name of a folder")
    return Path(os.path.abspath(path))


def shard_name(rank: int, size: int) -> str:
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


# -- unfinished and replaced checkpoints, told by their names ------------------------------------

CLAIM = ".saving"


def partial_path(path: Path, save_id: str) -> Path:
    """Where a checkpoint lies until it is complete."""
    return path.with_name(f"{path.name}.partial-{save_id}")


def replaced_path(path: Path, save_id: str) -> Path:
    """Where the old checkpoint of the same name lies for the moment between two renames."""
    return path.with_name(f"{path.name}.replaced-{save_id}")


def claim_path(path: Path, save_id: str = "") -> Path:
    """The file that says who is saving; with an id, where that of a dead job is put aside."""
    return path.with_name(f"{path.name}{CLAIM}{'-' * bool(save_id)}{save_id}")


_LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<what>partial|replaced|saving)-(?P<id>[0-9a-f]{16})")


def leftover(path: Path) -> tuple[str, str] | None:
    """(name of the checkpoint, "partial", "replaced" or "saving") of what a killed save left."""
    found = _LEFTOVER.fullmatch(path.name)
    return (found["name"], found["what"]) if found else None


def id_of(path: Path) -> str:
    """The id of the save that has left `path`."""
    return path.name.rpartition("-")[2]


# -- safetensors -----------------------------------------------------------------------------------


def header(tensors: Sequence[tuple[str, str, Sequence[int]]], about: Mapping[str, str]) -> bytes:
    """The header of a safetensors file in which `tensors` (key, dtype, shape) follow each other."""
    described: dict[str, Any] = {"__metadata__": dict(about)}
    at = 0
    for key, dtype, shape in tensors:
        word, count = SAFETENSORS[dtype]
        stored = [*shape, count] if count > 1 else [*shape]
        stop = at + _nbytes(dtype, shape)
        described[key] = {"dtype": word, "shape": stored, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # data starts where vector units like it
    return struct.pack("<Q", len(text)) + text


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    total = itemsize(dtype)
    for d in shape:
        total *= d
    return total


# -- the manifest's text ---------------------------------------------------------------------------

# The first line holds the checksum of all others, byte by byte.
_FIRST_LINE = re.compile(rb'\{"checksum": "crc32:([0-9a-f]{8})",\n')


def seal(document: Mapping[str, Any]) -> bytes:
    """The text of a manifest: JSON, one entry per line, its checksum in the first."""
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in document.items()]
    body = (",\n".join(lines) + "\n}\n").encode()
    return b'{"checksum": "crc32:%08x",\n' % zlib.crc32(body) + body


def unseal(text: bytes, file: Path) -> dict[str, Any]:
    """The document in a manifest's text."""
    first = _FIRST_LINE.match(text)
    if first is None:
        raise CorruptCheckpointError(f"{file} is no manifest, or damaged in its first line")
    if zlib.crc32(memoryview(text)[first.end() :]) != int(first[1], 16):
        raise CorruptCheckpointError(f"{file} is damaged or truncated: its checksum does not match")
    try:
        document = parse(text)
    except ValueError as error:
        raise CorruptCheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not the manifest of a {FORMAT}")
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise CheckpointError(
            f"{file} has format version {brief(version)}; this zerohvd reads version {VERSION}. "
            "Use the zerohvd that wrote it, or a newer one"
        )
    return document
