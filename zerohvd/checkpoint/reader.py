"""Reading a checkpoint: each rank the ranges it needs, each byte once, checked as it passes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from zerohvd.checkpoint import format as fmt
from zerohvd.checkpoint.entries import Want
from zerohvd.checkpoint.errors import CorruptCheckpointError, cannot, reading
from zerohvd.checkpoint.manifest import Manifest, Part, ShardFile, TensorInfo, read_manifest
from zerohvd.checkpoint.values import tree
from zerohvd.checkpoint.values.document import brief
from zerohvd.layout import Span


class Source(Protocol):
    """Where tensors come from: a checkpoint, or a plain file of weights."""

    tensors: Mapping[str, TensorInfo]
    manifest: Manifest

    def read(self, wants: Iterable[Want], rank: int = 0, size: int = 1) -> None:
        """Put everything where it is wanted, or raise.

        Bytes are checked as they pass, so some have arrived when others turn out to be damaged:
        they must go to memory that nobody uses yet.
        """


class _Chunk(NamedTuple):
    """Bytes that are read and checked together."""

    file: int
    offset: int
    nbytes: int
    sum: int | None  # None: of a plain file, about which nothing is known
    key: str


def _chunks(tensor: TensorInfo, part: Part, common: Span) -> Iterator[_Chunk]:
    """What to read of a part for the range `common` of its tensor."""
    begin, end = ((edge - part.start) * tensor.itemsize for edge in common)
    if not part.sums:
        for start in range(begin, end, fmt.CHUNK_BYTES):
            length = min(fmt.CHUNK_BYTES, end - start)
            yield _Chunk(part.file, part.offset + start, length, None, tensor.key)
        return
    total = (part.stop - part.start) * tensor.itemsize
    for i in range(begin // fmt.CHUNK_BYTES, -(-end // fmt.CHUNK_BYTES)):
        start = i * fmt.CHUNK_BYTES
        length = min(fmt.CHUNK_BYTES, total - start)
        yield _Chunk(part.file, part.offset + start, length, part.sum_of(i), tensor.key)


def _chunks_of(tensor: TensorInfo) -> Iterator[_Chunk]:
    for part in tensor.parts:
        yield from _chunks(tensor, part, part.span)


class _Transfer(NamedTuple):
    """Bytes of one chunk of a file for a want."""

    file: int
    offset: int
    nbytes: int
    want: int
    at: int  # byte inside the want
    chunk: _Chunk


class Reader:
    """A checkpoint on disk.

    Attributes:
        folder: Where its files lie.
        manifest: Read and checked.
        tensors: By key.
        shared: Every rank sees all files.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, shared: bool = True) -> None:
        self.folder, self.manifest, self.shared = folder, manifest, shared
        self.tensors: Mapping[str, TensorInfo] = manifest.tensors

    @classmethod
    def open(cls, path: Path) -> Reader:
        return cls(*read_manifest(path))

    # -- checking --------------------------------------------------------------------------------

    def check_file(self, file: ShardFile) -> None:
        """Raise unless the file is there, has its size and its header, and is of this save."""
        path = self.folder / file.name
        if not file.header_sum:
            return  # a plain file: its header is all that is known about it
        with _opened(path) as fd:
            found = os.fstat(fd).st_size
            head = _read(fd, path, min(file.header_bytes, found), 0)
        if zlib.crc32(head) == int(file.header_sum, 16):
            if found == file.nbytes:
                self._check_header(path, head)
                return
            what = "truncated" if found < file.nbytes else "too long"
            raise CorruptCheckpointError(
                f"{path} is {what}: {found} bytes, the manifest says {file.nbytes}"
            )
        if found < file.nbytes:
            raise CorruptCheckpointError(
                f"{path} is truncated: {found} bytes, the manifest says {file.nbytes}"
            )
        with _safetensors(path) as opened:
            about = opened.metadata() or {}
        if about.get("id", self.manifest.id) != self.manifest.id:
            raise CorruptCheckpointError(
                f"{path} belongs to another save ({about['id']}, the manifest's is "
                f"{self.manifest.id}): files of two checkpoints have been mixed"
            )
        raise CorruptCheckpointError(f"{path} is damaged: the checksum of its header differs")

    def _check_header(self, path: Path, head: bytes) -> None:
        """Raise unless the file says the same about its tensors as the manifest."""
        try:
            said = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path} has no header: {error}") from error
        for tensor, part in self._parts_in.get(path.name, ()):
            word, count = fmt.SAFETENSORS[tensor.dtype]
            length, begin = part.stop - part.start, part.offset - len(head)
            expected = {
                "dtype": word,
                "shape": [length, count] if count > 1 else [length],
                "data_offsets": [begin, begin + length * tensor.itemsize],
            }
            name = f"{tensor.key}[{part.start}:{part.stop}]"
            if not isinstance(said, dict) or said.get(name) != expected:
                raise CorruptCheckpointError(
                    f"{path} does not hold {name!r} as the manifest says ({expected}); its header: "
                    f"{brief(said.get(name)) if isinstance(said, dict) else brief(said)}"
                )

    @functools.cached_property
    def _parts_in(self) -> dict[str, list[tuple[TensorInfo, Part]]]:
        """By name of the file."""
        found: dict[str, list[tuple[TensorInfo, Part]]] = {}
        for tensor in self.tensors.values():
            for part in tensor.parts:
                found.setdefault(self.manifest.files[part.file].name, []).append((tensor, part))
        return found

    def check_files(self) -> None:
        """Raise unless all files are what the manifest says, as far as one sees from outside."""
        for file in self.manifest.files:
            self.check_file(file)

    def check_all(self, each: Callable[[int], None] = lambda nbytes: None) -> Iterator[str]:
        """What is wrong with any byte of the checkpoint, problem by problem.

        Args:
            each: Told how many bytes have been checked since it was last called.
        """
        whole: dict[int, bool] = {}
        for index, file in enumerate(self.manifest.files):
            try:
                self.check_file(file)
                whole[index] = True
            except Exception as error:
                whole[index] = False
                yield str(error)
        buffer = memoryview(bytearray(fmt.CHUNK_BYTES))
        with _Files(self.folder, self.manifest.files) as files:
            for chunk in sorted(c for t in self.tensors.values() for c in _chunks_of(t)):
                if not whole[chunk.file]:
                    continue
                try:
                    files.read(chunk, buffer)
                except CorruptCheckpointError as error:
                    yield str(error)
                each(chunk.nbytes)

    # -- reading ---------------------------------------------------------------------------------

    def read(self, wants: Iterable[Want], rank: int = 0, size: int = 1) -> None:
        """As in `Source`. All ranks together look at every file, needed or not."""
        wanted = list(wants)
        transfers = sorted(t for i, w in enumerate(wanted) for t in self._transfers(i, w))
        needed = {t.file for t in transfers}
        for index, file in enumerate(self.manifest.files):
            if index in needed or (self.shared and index % size == rank):
                self.check_file(file)
        self._carry_out(transfers, wanted)

    def files_for(self, wants: Iterable[Want]) -> set[int]:
        """Indices of the files that hold what is wanted."""
        return {
            part.file
            for want in wants
            for part, _ in self.tensors[want.key].overlapping(want.span)
        }

    def fill(self, want: Want) -> None:
        """One range, without a look at the files as a whole."""
        self._carry_out(sorted(self._transfers(0, want)), [want])

    def _carry_out(self, transfers: Sequence[_Transfer], wanted: Sequence[Want]) -> None:
        with _Files(self.folder, self.manifest.files) as files:
            for t in transfers:
                want = wanted[t.want]
                if not callable(want.into) and t.nbytes == t.chunk.nbytes:
                    files.read(t.chunk, want.into[t.at : t.at + t.nbytes])
                    continue
                begin = t.offset - t.chunk.offset
                block = files.kept(t.chunk)[begin : begin + t.nbytes]
                if callable(want.into):
                    want.into(t.at // self.tensors[want.key].itemsize, block)
                else:
                    want.into[t.at : t.at + t.nbytes] = block

    def _transfers(self, index: int, want: Want) -> Iterator[_Transfer]:
        tensor = self.tensors[want.key]
        width = tensor.itemsize
        if not callable(want.into) and len(want.into) != want.span.length * width:
            raise ValueError(
                f"{want.key!r}: {want.span.length} elements of {tensor.dtype} do not fit into "
                f"{len(want.into)} bytes"
            )
        for part, common in tensor.overlapping(want.span):
            start, stop = (part.offset + (edge - part.start) * width for edge in common)
            at = start - (common.start - want.span.start) * width
            for chunk in _chunks(tensor, part, common):
                begin = max(start, chunk.offset)
                nbytes = min(stop, chunk.offset + chunk.nbytes) - begin
                yield _Transfer(part.file, begin, nbytes, index, begin - at, chunk)

    def blocks(self, key: str) -> Iterator[memoryview]:
        """The bytes of a tensor in order, checked; a block is valid until the next one."""
        buffer = memoryview(bytearray(fmt.CHUNK_BYTES))
        with _Files(self.folder, self.manifest.files) as files:
            for chunk in _chunks_of(self.tensors[key]):
                yield files.read(chunk, buffer)

    def array(self, key: str) -> tuple[TensorInfo, np.ndarray[Any, np.dtype[np.uint8]]]:
        """A small tensor: what it is, and its bytes."""
        tensor = self.tensors.get(key)
        if tensor is None:
            raise CorruptCheckpointError(f"{self.folder}: {key!r} is referred to, but not stored")
        for index in {part.file for part in tensor.parts}:
            self.check_file(self.manifest.files[index])  # its size bounds what is allocated
        data = np.empty(tensor.nbytes, np.uint8)
        self.fill(Want(key, Span(0, tensor.numel), data.data))
        return tensor, data

    def decode(
        self,
        value: Any,
        kind: str,
        make: Callable[[TensorInfo, np.ndarray[Any, Any]], Any] | None = None,
    ) -> Any:
        """A value that `tree` has encoded, its arrays stored under `kind`.

        Args:
            value: From the manifest.
            kind: Of the tensors.
            make: Makes the arrays of a framework from their bytes.
        """

        def fetch(name: Any, of: Any) -> Any:
            tensor, data = self.array(f"{kind}/{name}")
            if of == "numpy" or make is None:
                return as_numpy(tensor, data)
            return make(tensor, data)

        with reading(self.folder / fmt.MANIFEST, "state" if kind == "shared" else "rank_states"):
            return tree.decode(value, fetch)


def as_numpy(tensor: TensorInfo, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array from its bytes; bfloat16, which numpy lacks, as its bits."""
    dtype = np.uint16 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype)
    return data.view(dtype).reshape(tensor.shape)


def open_safetensors(path: Path) -> Reader:
    """A plain safetensors file as if it were a checkpoint of nothing but parameters.

    The library checks the header, and that tensors follow each other without gaps, so their order
    gives the offsets. Bytes are read here: the library reads whole rows, and only dtypes that numpy
    knows.
    """
    found = {}
    with _opened(path) as fd:
        nbytes = os.fstat(fd).st_size
        at = header_bytes = 8 + int.from_bytes(_read(fd, path, min(8, nbytes), 0), "little")
    with _safetensors(path) as file:
        about = file.metadata() or {}
        for name in file.offset_keys():
            stored = file.get_slice(name)
            if stored.get_dtype() not in fmt.DTYPE_OF:
                raise CorruptCheckpointError(
                    f"{path}: {name!r} has the unknown dtype {stored.get_dtype()!r}"
                )
            shape, dtype = tuple(stored.get_shape()), fmt.DTYPE_OF[stored.get_dtype()]
            part = Part(0, math.prod(shape), 0, at, "")
            info = TensorInfo(f"param/{name}", dtype, shape, (part,))
            found[info.key] = info
            at += info.nbytes
    state = None
    with contextlib.suppress(ValueError):  # of somebody else
        state = json.loads(about.get(fmt.ABOUT, "null"))
    file_info = ShardFile(path.name, 0, nbytes, header_bytes, "")
    return Reader(path.parent, plain_manifest([file_info], found, state))


@contextlib.contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
    """The file, opened by the library; its errors name the file."""
    try:
        with safe_open(path, "np") as file:
            yield file
    except SafetensorError as error:
        raise CorruptCheckpointError(
            f"{path} is no safetensors file, or truncated: {error}"
        ) from error


def plain_manifest(
    files: Sequence[ShardFile], tensors: Mapping[str, TensorInfo], state: Any = None
) -> Manifest:
    """That of a file which says little but tensors."""
    return Manifest("", "", 1, None, "", "", {}, tuple(files), tensors, {}, state, ())


@dataclasses.dataclass
class ArraySource:
    """Tensors that something else reads: a file of a framework's own.

    Attributes:
        tensors: By key.
        fetch: The bytes of a range of a tensor, C-contiguous.
    """

    tensors: Mapping[str, TensorInfo]
    fetch: Callable[[TensorInfo, Span], np.ndarray[Any, Any]]
    manifest: Manifest = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.manifest = plain_manifest([], self.tensors)

    def read(self, wants: Iterable[Want], rank: int = 0, size: int = 1) -> None:
        """As in `Source`; nothing is known about the bytes but that they should be there."""
        for want in wants:
            tensor = self.tensors[want.key]
            step = max(1, fmt.CHUNK_BYTES // tensor.itemsize)
            for start in range(want.span.start, want.span.stop, step):
                span = Span(start, min(want.span.stop, start + step))
                data = self.fetch(tensor, span).reshape(-1).view(np.uint8).data
                at = start - want.span.start
                if callable(want.into):
                    want.into(at, data)
                else:
                    begin = at * tensor.itemsize
                    want.into[begin : begin + len(data)] = data


# -- files ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file descriptor for reading, with the path in its errors."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise cannot("read", path, error) from error
    try:
        yield fd
    finally:
        os.close(fd)


class _Files:
    """The shards, one open at a time, and the last chunk of which only a part was wanted."""

    def __init__(self, folder: Path, files: Sequence[ShardFile]) -> None:
        self._folder, self._files = folder, files
        self._stack = contextlib.ExitStack()
        self._open = (-1, -1)  # index, descriptor
        self._buffer = memoryview(b"")
        self._kept: tuple[_Chunk, memoryview] | None = None

    def read(self, chunk: _Chunk, into: memoryview) -> memoryview:
        """The bytes of the chunk, at the beginning of `into`; raises unless they are sound."""
        path = self._folder / self._files[chunk.file].name
        if self._open[0] != chunk.file:
            self._stack.close()
            self._open = (chunk.file, self._stack.enter_context(_opened(path)))
        block = into[: chunk.nbytes]
        _read_into(self._open[1], path, block, chunk.offset)
        if chunk.sum is not None and zlib.crc32(block) != chunk.sum:
            raise CorruptCheckpointError(
                f"{path} is damaged in {chunk.key!r}: the checksum of bytes {chunk.offset} to "
                f"{chunk.offset + chunk.nbytes} differs"
            )
        return block

    def kept(self, chunk: _Chunk) -> memoryview:
        """The same in a buffer, which stays for neighbours that want more of the chunk."""
        if self._kept is None or self._kept[0] != chunk:
            if not len(self._buffer):
                self._buffer = memoryview(bytearray(fmt.CHUNK_BYTES))
            self._kept = None
            self._kept = (chunk, self.read(chunk, self._buffer))
        return self._kept[1]

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()


def _read(fd: int, path: Path, nbytes: int, offset: int) -> bytes:
    data = bytearray(nbytes)
    _read_into(fd, path, memoryview(data), offset)
    return bytes(data)


def _read_into(fd: int, path: Path, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        try:
            count = os.preadv(fd, [into[done:]], offset + done)
        except OSError as error:
            raise cannot("read", path, error) from error
        if count == 0:
            raise CorruptCheckpointError(
                f"{path} is truncated: byte {offset + done} is behind its end"
            )
        done += count
