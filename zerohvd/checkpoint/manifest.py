"""What a checkpoint holds, and where: the one file that makes shards a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from zerohvd.checkpoint import format as fmt
from zerohvd.checkpoint.errors import CheckpointError, CorruptCheckpointError, cannot
from zerohvd.layout import Span


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
        document = fmt.unseal(text, file)
        try:
            manifest = cls(
                id=document["id"],
                framework=document["framework"],
                size=document["size"],
                step=document["step"],
                created=document["created"],
                writer=document["writer"],
                config=document["config"],
                files=tuple(ShardFile(**f) for f in document["files"]),
                tensors={
                    key: TensorInfo(
                        key, t["dtype"], tuple(t["shape"]), tuple(Part(*p) for p in t["parts"])
                    )
                    for key, t in document["tensors"].items()
                },
                values=document["values"],
                state=document["state"],
                rank_states=tuple(document["rank_states"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{file} lacks or misspells {error}") from error
        if document.get("chunk_bytes") != fmt.CHUNK_BYTES:
            raise CheckpointError(f"{file} has chunks of {document.get('chunk_bytes')} bytes")
        return manifest


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
    return next((p for p in leftovers(path, "replaced") if is_complete(p)), path)


def leftovers(path: Path, what: str) -> list[Path]:
    """What killed saves of `path` have left behind: "partial" or "replaced" ones."""
    if not path.parent.is_dir():
        return []
    return sorted(p for p in path.parent.iterdir() if fmt.leftover(p) == (path.name, what))


def read_manifest(path: Path) -> tuple[Path, Manifest]:
    """The folder of a checkpoint, and its manifest.

    Raises:
        CheckpointError: There is none at `path`, with the reason.
    """
    folder = resolve(path)
    file = folder / fmt.MANIFEST
    try:
        return folder, Manifest.from_bytes(file.read_bytes(), file)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_why_missing(path, folder)) from None
    except OSError as error:
        raise cannot("read", file, error) from error


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
