"""What a checkpoint holds, and where: the one file that makes shards a checkpoint."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from zerohvd.checkpoint import format as fmt
from zerohvd.checkpoint.errors import CheckpointError, cannot
from zerohvd.checkpoint.values.document import LARGEST, Field, brief
from zerohvd.layout import Span

# How often, and after which pause, a checkpoint that is being replaced is looked for.
_LOOKS = 5
_LOOK_SECONDS = 0.02


class Part(NamedTuple):
    """A range of a flattened tensor, in one file."""

    start: int
    stop: int
    file: int  # index into Manifest.files
    offset: int  # bytes from the beginning of the file
    sums: str  # eight hex digits (CRC-32) per chunk of the part

    @property
    def span(self) -> Span:
        return Span(self.start, self.stop)

    def sum_of(self, chunk: int) -> int:
        return int(self.sums[8 * chunk : 8 * chunk + 8], 16)


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor, and the parts that make it up."""

    key: str  # "<kind>/<name>"
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]  # in ascending order, without gap or overlap

    @property
    def kind(self) -> str:
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        return self.key.partition("/")[2]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return fmt.itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @cached_property
    def _starts(self) -> list[int]:
        return [p.start for p in self.parts]

    def overlapping(self, span: Span) -> Iterator[tuple[Part, Span]]:
        """The parts that hold something of `span`, each with the common range."""
        first = max(0, bisect_right(self._starts, span.start) - 1)
        for part in self.parts[first:]:
            if part.start >= span.stop:
                return
            common = part.span.intersect(span)
            if common.length:
                yield part, common


class ShardFile(NamedTuple):
    """A file beside the manifest."""

    name: str
    rank: int  # that wrote it
    nbytes: int
    header_bytes: int
    header_sum: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A checkpoint, described.

    Attributes:
        id: Of this save; every shard carries it too.
        framework: "torch" or "keras".
        size: Number of ranks that wrote.
        step: Of the training, None where nobody said.
        created: Time in UTC, ISO 8601.
        writer: Name and version of the program.
        config: Settings of the optimizer that was saved, for people to read.
        files: The shards.
        tensors: By key, "<kind>/<name>".
        values: Parameter name -> state that is no tensor, as `tree` encodes it.
        state: What is the same on all ranks, as `tree` encodes it.
        rank_states: What is each rank's own, in rank order.
    """

    id: str
    framework: str
    size: int
    step: int | None
    created: str
    writer: str
    config: Mapping[str, Any]
    files: tuple[ShardFile, ...]
    tensors: Mapping[str, TensorInfo]
    values: Mapping[str, Mapping[str, Any]]
    state: Any
    rank_states: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def of_kind(self, *kinds: str) -> list[TensorInfo]:
        return [t for t in self.tensors.values() if t.kind in kinds]

    def to_bytes(self) -> bytes:
        return fmt.seal(
            {
                "format": fmt.FORMAT,
                "version": fmt.VERSION,
                "id": self.id,
                "framework": self.framework,
                "size": self.size,
                "step": self.step,
                "created": self.created,
                "writer": self.writer,
                "chunk_bytes": fmt.CHUNK_BYTES,
                "config": self.config,
                "files": [f._asdict() for f in self.files],
                "state": self.state,
                "rank_states": self.rank_states,
                "values": self.values,
                "tensors": {
                    key: {"dtype": t.dtype, "shape": t.shape, "parts": t.parts}
                    for key, t in self.tensors.items()
                },
            }
        )

    @classmethod
    def from_bytes(cls, text: bytes, file: Path) -> Manifest:
        document = Field(fmt.unseal(text, file), file)
        if document.value.get("chunk_bytes") != fmt.CHUNK_BYTES:
            raise CheckpointError(
                f"{file} has chunks of {brief(document.value.get('chunk_bytes'))} bytes"
            )
        size = document["size"].integer(1)
        files = tuple(_shard_file(f, size) for f in document["files"].list(size))
        if len({f.name for f in files}) < size:
            raise document["files"].wrong("files with different names")
        step = document["step"]
        return cls(
            id=document["id"].text("[0-9a-f]{16}", "16 hex digits"),
            framework=document["framework"].text(),
            size=size,
            step=None if step.value is None else step.integer(-LARGEST),
            created=document["created"].text(),
            writer=document["writer"].text(),
            config=document["config"].object(),
            files=files,
            tensors=_tensors(document["tensors"], files),
            values={name: of.object() for name, of in document["values"].items()},
            state=document["state"].value,
            rank_states=tuple(f.value for f in document["rank_states"].list(size)),
        )


# -- what a manifest says, checked -----------------------------------------------------------------

_SUM = "[0-9a-f]{8}"
_SUMS = re.compile("[0-9a-f]*")
_MOST_DIMENSIONS = 64  # of numpy and torch


def _shard_file(said: Field, size: int) -> ShardFile:
    nbytes = said["nbytes"].integer()
    return ShardFile(
        # Beside the manifest: no name leads anywhere else.
        said["name"].text("[A-Za-z0-9_][A-Za-z0-9_.-]*", "the name of a file in the same folder"),
        said["rank"].integer(0, size - 1),
        nbytes,
        said["header_bytes"].integer(8, nbytes),
        said["header_sum"].text(_SUM, "8 hex digits"),
    )


def _tensors(said: Field, files: Sequence[ShardFile]) -> dict[str, TensorInfo]:
    # There may be a million parts. Sound ones are seen without a word; who is not is asked again.
    found = {}
    for key, value in said.object().items():
        where = f"tensors[{key!r}]"
        found[key] = _sound_tensor(key, value, files) or _tensor(
            key, Field(value, said.file, where), files
        )
    return found


def _sound_tensor(key: str, said: Any, files: Sequence[ShardFile]) -> TensorInfo | None:
    """As `_tensor`, for most tensors; None: not so simple, or wrong."""
    try:
        dtype, shape = said["dtype"], tuple(said["shape"])
        parts = tuple(Part(*part) for part in said["parts"])
        width, at = fmt.itemsize(dtype), 0
        if "/" not in key[1:] or len(shape) > _MOST_DIMENSIONS:
            return None
        for start, stop, file, offset, sums in parts:
            nbytes = (stop - start) * width
            if not (
                type(start) is type(stop) is type(file) is type(offset) is int
                and start == at < stop
                and 0 <= file < len(files)
                and files[file].header_bytes <= offset <= files[file].nbytes - nbytes
                and len(sums) == 8 * -(-nbytes // fmt.CHUNK_BYTES)
                and _SUMS.fullmatch(sums)
            ):
                return None
            at = stop
        if not all(type(d) is int and d > 0 for d in shape) or math.prod(shape) != at:
            return None
        return TensorInfo(key, dtype, shape, parts)
    except (KeyError, TypeError, ValueError):
        return None


def _tensor(key: str, said: Field, files: Sequence[ShardFile]) -> TensorInfo:
    if not key.partition("/")[0] or "/" not in key:
        raise said.wrong("called <kind>/<name>")
    dtype = said["dtype"].text("|".join(fmt.SAFETENSORS), "a dtype that can be stored")
    shape = tuple(d.integer() for d in said["shape"].list()[: _MOST_DIMENSIONS + 1])
    numel = math.prod(shape)
    if len(shape) > _MOST_DIMENSIONS or numel * fmt.itemsize(dtype) > LARGEST:
        raise said["shape"].wrong("a shape that fits into memory")
    stop, parts = 0, []
    for each in said["parts"].list():
        part = _part(each, files, fmt.itemsize(dtype))
        if part.start != stop:
            raise each.wrong(f"the elements from {stop}: parts follow each other")
        stop = part.stop
        parts.append(part)
    if stop != numel:
        raise said["parts"].wrong(f"all {numel} elements of shape {shape}; they are {stop}")
    return TensorInfo(key, dtype, shape, tuple(parts))


def _part(said: Field, files: Sequence[ShardFile], itemsize: int) -> Part:
    start, stop, file, offset, sums = said.list(5)
    first = start.integer()
    part = Part(
        first, stop.integer(first), file.integer(0, len(files) - 1), offset.integer(), sums.text()
    )
    within, nbytes = files[part.file], (part.stop - part.start) * itemsize
    if part.offset < within.header_bytes or part.offset + nbytes > within.nbytes:
        raise said.wrong(f"bytes of {within.name}, behind its header and before its end")
    if len(part.sums) != 8 * -(-nbytes // fmt.CHUNK_BYTES) or not _SUMS.fullmatch(part.sums):
        raise sums.wrong(f"8 hex digits for every {fmt.CHUNK_BYTES} bytes")
    return part


def names_in(state: Any, key: str) -> dict[str, str]:
    """What a state says of names under `key`, such as the aliases; empty where it does not."""
    found = state.get(key) if isinstance(state, Mapping) else None
    if found is None:
        return {}
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(other, str) for name, other in found.items()
    ):
        raise ValueError(f"state.{key} in {fmt.MANIFEST} does not map names to names")
    return dict(found)


def put_together(parts: Iterable[tuple[str, str, Sequence[int], Part]]) -> dict[str, TensorInfo]:
    """Tensors from the (key, dtype, shape, part) that the ranks have written.

    Raises:
        ValueError: Ranks differ about a tensor, or together wrote less or more than all of it.
    """
    found: dict[str, tuple[str, tuple[int, ...], list[Part]]] = {}
    for key, dtype, shape, part in parts:
        known = found.setdefault(key, (dtype, tuple(shape), []))
        if known[:2] != (dtype, tuple(shape)):
            raise ValueError(
                f"the ranks differ about {key!r}: {known[0]} {known[1]} and {dtype} {tuple(shape)}"
            )
        known[2].append(part)
    tensors = {}
    for key, (dtype, shape, held) in found.items():
        held.sort(key=lambda p: (p.start, p.stop))
        stop = 0
        for part in held:
            if part.start != stop:
                what = "nobody" if part.start > stop else "more than one rank"
                raise ValueError(
                    f"{what} wrote the elements from {min(stop, part.start)} of {key!r}"
                )
            stop = part.stop
        if stop != math.prod(shape):
            raise ValueError(f"of {key!r} with shape {shape} only {stop} elements were written")
        tensors[key] = TensorInfo(key, dtype, shape, tuple(held))
    return tensors


# -- finding a manifest --------------------------------------------------------------------------


def is_complete(path: Path) -> bool:
    return (path / fmt.MANIFEST).is_file()


def resolve(path: Path) -> Path:
    """The folder to read for the checkpoint `path`.

    That of the old one, where a save was killed in the moment between moving the old checkpoint
    out of the way and moving the new one in.
    """
    if is_complete(path) or path.exists():
        return path
    left = [p for p in leftovers(path, "replaced") if is_complete(p)]
    return max(left, key=_written, default=path)


def _written(folder: Path) -> float:
    try:
        return (folder / fmt.MANIFEST).stat().st_mtime
    except OSError:
        return 0.0


def leftovers(path: Path, what: str) -> list[Path]:
    """What killed saves of `path` have left behind: "partial", "replaced" or "saving" ones."""
    try:
        return sorted(p for p in path.parent.iterdir() if fmt.leftover(p) == (path.name, what))
    except OSError:
        return []


def read_manifest(path: Path) -> tuple[Path, Manifest]:
    """The folder of a checkpoint, and its manifest.

    Raises:
        CheckpointError: There is none at `path`, with the reason.
    """
    for _ in range(_LOOKS):
        folder = resolve(path)
        file = folder / fmt.MANIFEST
        try:
            return folder, Manifest.from_bytes(file.read_bytes(), file)
        except (FileNotFoundError, NotADirectoryError):
            # A save may be about to replace it: the old one has gone, the new one comes.
            if folder.exists() or not (resolve(path) != folder or leftovers(path, "partial")):
                break
            time.sleep(_LOOK_SECONDS)
        except (OSError, ValueError) as error:
            raise cannot("read", file, error) from error
    raise CheckpointError(_why_missing(path, folder))


def _why_missing(path: Path, folder: Path) -> str:
    if not folder.exists():
        unfinished = leftovers(path, "partial")
        hint = f"; a save of it was never finished ({unfinished[-1].name})" if unfinished else ""
        return f"there is no checkpoint {path}{hint}"
    if not folder.is_dir():
        return f"{path} is a file, not a checkpoint's folder"
    if fmt.leftover(path):
        return f"{path} is an unfinished checkpoint: its save was interrupted before {fmt.MANIFEST}"
    inside = sorted(p.name for p in folder.iterdir() if is_complete(p) and not fmt.leftover(p))
    if inside:
        return f"{path} is not a checkpoint, but holds some: {', '.join(inside[-5:])}"
    return f"{path} is not a checkpoint: {fmt.MANIFEST} is missing"
