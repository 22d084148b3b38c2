"""Memory on the host that comes and goes without being made anew.

What costs most about a fresh megabyte is that the kernel has to find and clear its pages. A unit
that is freed has pages, and the next one needs some, or the gradients that take its place: pages
are moved, from one range of addresses to another. A range keeps its addresses for ever, so that
views into it stay valid.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from zerohvd.layout import round_up

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NO_ACCESS = 0
_DONTNEED = 4
_HUGE_PAGES = 14
_HUGE = 2 << 20
# A process can have 65530 mappings. Each idle piece may become one; each part that is kept, and
# what comes and goes beside it, three each: huge pages are mappings of their own.
_MOST_IDLE = 2 << 30
_MOST_KEPT = 5_000
_FIXED, _NORESERVE = 0x10, 0x4000
_MOVE = 1 | 2 | 4  # may move, to a fixed place, and the old range stays reserved


def _libc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mremap.argtypes = [address, size, size, number, address]
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.mprotect.argtypes = [address, size, number]
    libc.madvise.argtypes = [address, size, number]
    return libc


LIBC = _libc()


def users(storage: torch.UntypedStorage) -> int:
    """How many tensors, saved ones of autograd's too, refer to these bytes."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_limited(*limits: int) -> bool:
    """Whether any of these RLIMIT_... is set."""
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def is_counted() -> bool:
    """Whether all that is mapped counts as memory (ulimit -d or -v), and so do gaps."""
    return is_limited(resource.RLIMIT_DATA, resource.RLIMIT_AS)


def _ask_for_huge_pages(start: int, stop: int) -> None:
    """Where the system has them for those who ask: one fault in the place of 512."""
    assert LIBC is not None
    # Whole ones only: the others could be mostly waste, or could not be moved.
    start, stop = round_up(start, _HUGE), stop // _HUGE * _HUGE
    if start < stop:
        LIBC.madvise(start, stop - start, _HUGE_PAGES)


class Range:
    """A range of addresses, with or without memory behind it; without at first."""

    parts = 0  # that are kept, of all ranges

    def __init__(self, nbytes: int, pool: Pool, kept: Sequence[tuple[int, int]] = ()) -> None:
        """
        Args:
            kept: Parts, by their first byte and the one behind, that have memory for ever.
        """
        self.nbytes = round_up(nbytes, mmap.PAGESIZE)
        loose = _between([part for part in kept if part[0] < part[1]], self.nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._held = mmap.mmap(-1, self.nbytes + _HUGE, flags=flags, prot=_READ_WRITE)
        # The tensor keeps the mapping alive, and views of it keep the tensor's storage.
        first = torch.frombuffer(self._held, dtype=torch.uint8).data_ptr()
        self._offset = (_best_place(loose) - first) % _HUGE
        self.tensor = self._part(0, nbytes)
        self.address = self.tensor.data_ptr()
        # What cannot be written to counts as nobody's memory.
        assert LIBC is not None
        if LIBC.mprotect(first, self.nbytes + _HUGE, _NO_ACCESS):
            raise _no_memory(self.nbytes)
        for start, stop in _between(loose, self.nbytes):
            if LIBC.mprotect(self.address + start, stop - start, _READ_WRITE):
                raise _no_memory(stop - start)
            _ask_for_huge_pages(self.address + start, self.address + stop)
        self.pieces: list[Piece] = []
        for start, stop in loose:
            _ask_for_huge_pages(self.address + start, self.address + stop)
            self.pieces += _cut(self.address + start, self.address + stop)
        self.kept = [self._part(start, stop - start) for start, stop in kept]
        Range.parts += len(self.kept)
        self._pool = pool
        self.there = False

    def __del__(self) -> None:
        Range.parts -= len(getattr(self, "kept", ()))

    def _part(self, start: int, nbytes: int) -> torch.Tensor:
        """Bytes of the range, as a tensor with a storage of its own."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        offset = self._offset + start
        return torch.frombuffer(self._held, dtype=torch.uint8, count=nbytes, offset=offset)

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()

    @property
    def loose(self) -> int:
        """Bytes that come and go, but for rests of pages."""
        return self.tensor.nbytes - sum(part.nbytes for part in self.kept)

    def allocate(self) -> None:
        """Have memory, with whatever may stand in it."""
        if not self.there:
            self._pool.give(self)
            self.there = True

    def free(self) -> None:
        """Let the next one have the memory."""
        if self.there:
            self._pool.take(self)
            self.there = False


def _between(parts: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """The whole pages of a range of `nbytes` that none of these parts has a byte in."""
    found, free = [], 0
    for start, stop in sorted(parts):
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        if free < start:
            found.append((free, start))
        free = max(free, round_up(stop, mmap.PAGESIZE))
    return [*found, (free, nbytes)] if free < nbytes else found


def _best_place(loose: Sequence[tuple[int, int]]) -> int:
    """Where a range should begin, counted from a huge page's beginning, for the parts that come
    and go to be as many huge pages as they can: only those fit into every other range."""

    def huge_pages(place: int) -> int:
        return sum(
            max(0, (place + stop) // _HUGE - round_up(place + start, _HUGE) // _HUGE)
            for start, stop in loose
        )

    return max([0, *(-start % _HUGE for start, _ in loose)], key=huge_pages)


class Piece(NamedTuple):
    """Memory that is moved at once: a huge page, or what is left at an end."""

    address: int
    nbytes: int


def _cut(start: int, stop: int) -> Iterator[Piece]:
    while start < stop:
        end = min(stop, (start // _HUGE + 1) * _HUGE)
        yield Piece(start, end - start)
        start = end


class Pool:
    """Pages of ranges that do not need them. A piece can take the place of any of its size."""

    def __init__(self) -> None:
        # By size, then by address: whose it is. Addresses must not go while there are pages.
        self._idle: dict[int, dict[int, Range]] = {}

    def take(self, range_: Range) -> None:
        room = _MOST_IDLE - self.nbytes
        for piece in range_.pieces:
            room -= piece.nbytes
            if room < 0:
                _empty(piece)
            else:
                self._idle.setdefault(piece.nbytes, {})[piece.address] = range_

    def give(self, range_: Range) -> None:
        assert LIBC is not None
        moves: list[tuple[int, Piece]] = []
        owners = []  # whose addresses must not go before the pages
        for piece in self._without_own(range_):
            donors = self._idle.get(piece.nbytes)
            if donors:
                address = next(iter(donors))
                owners.append(donors.pop(address))
                _append(moves, address, piece)
        for address, piece in moves:
            _move(address, piece)
        if LIBC.mprotect(range_.address, range_.nbytes, _READ_WRITE):
            raise _no_memory(range_.nbytes)

    def _without_own(self, range_: Range) -> list[Piece]:
        """Those that the range has no pages for any more. Nothing may be moved to the others."""
        gone = []
        for piece in range_.pieces:
            if self._idle.get(piece.nbytes, {}).pop(piece.address, None) is None:
                gone.append(piece)
        return gone

    def trim(self, keep: int = 0) -> None:
        """Give what is idle back to the system, but for about `keep` bytes."""
        surplus = self.nbytes - keep
        for nbytes in sorted(self._idle):  # huge pages last: they fit everywhere
            pieces = self._idle[nbytes]
            while pieces and surplus > 0:
                address, owner = pieces.popitem()
                _empty(Piece(address, nbytes))
                del owner
                surplus -= nbytes

    @property
    def nbytes(self) -> int:
        return sum(nbytes * len(pieces) for nbytes, pieces in self._idle.items())


def _empty(piece: Piece) -> None:
    assert LIBC is not None
    LIBC.madvise(*piece, _DONTNEED)
    LIBC.mprotect(*piece, _NO_ACCESS)


def _append(moves: list[tuple[int, Piece]], donor: int, piece: Piece) -> None:
    """One more move; of neighbours to neighbours, it is one with the last."""
    if moves and piece.nbytes == _HUGE:  # others are mappings of their own
        address, (target, nbytes) = moves[-1]
        if (address + nbytes, target + nbytes, nbytes % _HUGE) == (donor, piece.address, 0):
            moves[-1] = address, Piece(target, nbytes + piece.nbytes)
            return
    moves.append((donor, piece))


def _move(donor: int, piece: Piece) -> None:
    """Have the pages at another address; fresh ones if that does not work."""
    assert LIBC is not None
    address, nbytes = piece
    if LIBC.mremap(donor, nbytes, nbytes, _MOVE, address) == address:
        LIBC.mprotect(donor, nbytes, _NO_ACCESS)
        return
    # What was there may be gone by now.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE
    if LIBC.mmap(address, nbytes, _NO_ACCESS, flags, -1, 0) != address:
        raise _no_memory(nbytes)
    if nbytes > _HUGE:  # not every kernel moves what has come from several places before
        for start in range(0, nbytes, _HUGE):
            _move(donor + start, Piece(address + start, min(_HUGE, nbytes - start)))
    else:
        _empty(Piece(donor, nbytes))


def _no_memory(nbytes: int) -> MemoryError:
    error = os.strerror(ctypes.get_errno())
    return MemoryError(f"cannot get {nbytes} bytes for parameters or gradients: {error}")


class Resized:
    """The same for memory of a device, whose allocator knows how to use things again."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.loose = nbytes
        self.kept: list[torch.Tensor] = []
        self.free()

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()

    @property
    def there(self) -> bool:
        return self.storage.nbytes() > 0

    def allocate(self) -> None:
        if not self.there:
            self.storage.resize_(self.loose)

    def free(self) -> None:
        self.storage.resize_(0)


# One pool for all models: what one of them frees, another can use.
POOL = Pool()


def keeps_addresses() -> bool:
    """Whether a range can be had: where reserved addresses count as memory (ulimit -v), none is."""
    return LIBC is not None and not is_limited(resource.RLIMIT_AS)


def can_keep(parts: int, device: torch.device) -> bool:
    """Whether memory for this device can be freed but for so many parts of it."""
    return device.type == "cpu" and keeps_addresses() and Range.parts + parts <= _MOST_KEPT


def make(
    nbytes: int, device: torch.device, kept: Sequence[tuple[int, int]] = ()
) -> Range | Resized:
    """Memory that can be freed and had again, but for the parts that are kept."""
    if device.type == "cpu" and keeps_addresses() and nbytes:
        return Range(nbytes, POOL, kept)
    return Resized(nbytes, device)


def borrow(nbytes: int) -> Range | None:
    """A range for a while, to be freed, of pages that are idle; None if there are few of them."""
    # Others count on what is idle: a part of it has to be left.
    if not nbytes or POOL.nbytes < 2 * nbytes:
        return None
    range_ = Range(nbytes, POOL)
    range_.allocate()
    return range_
