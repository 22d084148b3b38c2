"""What a rank gives to be stored, and what it asks for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zerohvd.checkpoint.format import itemsize
from zerohvd.checkpoint.values.tree import Array
from zerohvd.layout import Span

Bytes = npt.NDArray[Any]  # an array of any dtype; only its bytes count

# Smaller tensors are not cut when ranks share out what all of them hold.
_SMALL = 1 << 16


@dataclasses.dataclass(frozen=True)
class Entry:
    """A range of a tensor that this rank holds.

    Args:
        kind: "param", "master", "exp_avg", ...; no slash.
        name: Of the parameter, as the user knows it.
        dtype: A key of `format.SAFETENSORS`.
        shape: Of the whole tensor.
        span: What is here, of the flattened tensor.
        data: The C-contiguous bytes of the span, or what gives them when their turn comes.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    span: Span
    data: Bytes | Callable[[], Bytes]

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def nbytes(self) -> int:
        return self.span.length * itemsize(self.dtype)

    def read(self) -> memoryview:
        """The bytes; without a copy where they lie in this process' memory already."""
        data = self.data() if callable(self.data) else self.data
        view = data.reshape(-1).view(np.uint8)
        if view.nbytes != self.nbytes:
            raise ValueError(
                f"{self.key!r} should have {self.nbytes} bytes here, but has {view.nbytes}"
            )
        return view.data

    def copied(self) -> Entry:
        """The same with bytes of its own, which training does not change."""
        return dataclasses.replace(self, data=np.array(self.read(), np.uint8))

    def cut(self, start: int, stop: int) -> Entry:
        """Elements [start, stop) of the entry."""
        if (start, stop) == (0, self.span.length):
            return self
        width = itemsize(self.dtype)
        return dataclasses.replace(
            self,
            span=Span(self.span.start + start, self.span.start + stop),
            data=lambda: np.asarray(self.read()[start * width : stop * width]),
        )


def whole(kind: str, name: str, array: Array) -> Entry:
    """The entry of an array that lies on this rank alone."""
    span = Span(0, math.prod(array.shape))
    return Entry(kind, name, array.dtype, array.shape, span, array.data)


def share_out(
    entries: Sequence[Entry], rank: int, size: int, *, uncut: bool = False
) -> list[Entry]:
    """What `rank` writes of that which every rank holds: each byte is written once.

    Args:
        entries: The same on all ranks.
        rank: Whose share.
        size: Number of ranks.
        uncut: Leave every tensor to one rank; for what might differ between ranks, so that no
            tensor is put together from two of them.
    """
    total = sum(e.nbytes for e in entries)
    begin, end = total * rank // size, total * (rank + 1) // size
    mine: list[Entry] = []
    at = 0
    for entry in entries:
        if entry.nbytes == 0 or uncut or entry.nbytes < _SMALL:
            if begin <= at < end or (rank == size - 1 and at == total):
                mine.append(entry)
        else:
            width = itemsize(entry.dtype)
            start, stop = (
                min(max(-(-(edge - at) // width), 0), entry.span.length) for edge in (begin, end)
            )
            if start < stop:
                mine.append(entry.cut(start, stop))
        at += entry.nbytes
    return mine


class Want(NamedTuple):
    """A range of a stored tensor that this rank needs.

    Args:
        key: Of the tensor.
        span: Which elements.
        into: Memory for exactly these bytes, or what takes them block by block: it is called with
            the first element of the block, counted from the beginning of the span, and its bytes.
    """

    key: str
    span: Span
    into: memoryview | Callable[[int, memoryview], None]


@dataclasses.dataclass
class Content:
    """All that one rank stores.

    Attributes:
        entries: What this rank writes; no element is written by two ranks.
        values: Parameter name -> state that is no tensor; each parameter from one rank only.
        state: What all ranks share, encoded by `tree`; rank 0's is stored.
        rank_state: This rank's own, encoded by `tree`.
        framework, step, config: As in `Manifest`; rank 0's are stored.
    """

    framework: str
    entries: list[Entry] = dataclasses.field(default_factory=list)
    values: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    state: Any = None
    rank_state: Any = None
    step: int | None = None
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for e in self.entries)

    def copied(self) -> Content:
        return dataclasses.replace(self, entries=[e.copied() for e in self.entries])
