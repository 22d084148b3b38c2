"""Memory on the host that comes and goes without being made anew.

What costs most about a fresh megabyte is that the kernel has to find and clear its pages. A unit
that is freed has pages, and the next one needs some: they are moved, from one range of addresses to
another. A range keeps its addresses for ever, so that views into it stay valid.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import resource
import sys
from collections.abc import Sequence

import torch

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NO_ACCESS = 0
_DONTNEED = 4
_HUGE_PAGES = 14
_HUGE = 2 << 20
_ALIGNED = 64  # bytes: a processor's cache line
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


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Where the system has them for those who ask: one fault in the place of 512."""
    assert LIBC is not None
    inside = nbytes // _HUGE * _HUGE  # a huge page at the end could be mostly waste
    if inside:
        LIBC.madvise(address, inside, _HUGE_PAGES)


class Range:
    """A range of addresses, with or without memory behind it; without at first."""

    def __init__(self, nbytes: int, pool: Pool) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        held = mmap.mmap(-1, self.nbytes + _HUGE, flags=flags, prot=_READ_WRITE)
        # The tensor keeps the mapping alive, and views of it keep the tensor's storage.
        first = torch.frombuffer(held, dtype=torch.uint8).data_ptr()
        self.tensor = torch.frombuffer(
            held, dtype=torch.uint8, count=nbytes, offset=-first % _HUGE
        )
        self.address = self.tensor.data_ptr()
        _ask_for_huge_pages(self.address, self.nbytes)
        # What cannot be written to counts as nobody's memory.
        assert LIBC is not None
        LIBC.mprotect(first, self.nbytes + _HUGE, _NO_ACCESS)
        self._pool = pool
        self.there = False

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()

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


class Pool:
    """Pages of ranges that do not need them."""

    def __init__(self) -> None:
        self._idle: list[Range] = []

    def take(self, range_: Range) -> None:
        self._idle.append(range_)

    def give(self, range_: Range) -> None:
        assert LIBC is not None
        if range_ in self._idle:
            self._idle.remove(range_)
            return
        if self._idle:
            donor = min(self._idle, key=lambda r: abs(r.nbytes - range_.nbytes))
            self._idle.remove(donor)
            size = min(donor.nbytes, range_.nbytes)
            moved = LIBC.mremap(donor.address, size, size, _MOVE, range_.address)
            _empty(donor)
            if moved != range_.address:
                _map_again(range_)  # the range may be gone by now; its pages are fresh ones
        if LIBC.mprotect(range_.address, range_.nbytes, _READ_WRITE):
            raise _no_memory(range_)

    def trim(self) -> None:
        """Give all that is idle back to the system."""
        for range_ in self._idle:
            _empty(range_)
        self._idle = []

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self._idle)


def _empty(range_: Range) -> None:
    assert LIBC is not None
    LIBC.madvise(range_.address, range_.nbytes, _DONTNEED)
    LIBC.mprotect(range_.address, range_.nbytes, _NO_ACCESS)


def _map_again(range_: Range) -> None:
    assert LIBC is not None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE
    found = LIBC.mmap(range_.address, range_.nbytes, _NO_ACCESS, flags, -1, 0)
    if found != range_.address:
        raise _no_memory(range_)


def _no_memory(range_: Range) -> MemoryError:
    error = os.strerror(ctypes.get_errno())
    return MemoryError(f"cannot get {range_.nbytes} bytes for gathered parameters: {error}")


class Resized:
    """The same for memory of a device, whose allocator knows how to use things again."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.free()

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()

    @property
    def there(self) -> bool:
        return self.storage.nbytes() > 0

    def allocate(self) -> None:
        if not self.there:
            self.storage.resize_(self.nbytes)

    def free(self) -> None:
        self.storage.resize_(0)


class Lasting:
    """Memory for values that come and go while much else does, and that is there from the start.

    In the heap, each of them would lie in the way when the room around it is wanted again, and the
    heap would grow by several times their size. The pages go when nobody needs the values.

    Attributes:
        parts: 1-D, one for each of the lengths.
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype) -> None:
        step = _ALIGNED // dtype.itemsize
        starts = list(itertools.accumulate((-(-n // step) * step for n in lengths), initial=0))
        nbytes = starts[-1] * dtype.itemsize
        # Huge pages begin at multiples of their size; where addresses are counted, none is wasted.
        huge = nbytes >= _HUGE and not is_counted()
        spare = _HUGE if huge else 0
        try:
            self._held = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"cannot get {nbytes} bytes: {error.strerror}") from error
        first = torch.frombuffer(self._held, dtype=torch.uint8).data_ptr()
        offset = -first % _HUGE if huge else 0
        whole = torch.frombuffer(self._held, dtype=dtype, count=starts[-1], offset=offset)
        if huge:
            _ask_for_huge_pages(whole.data_ptr(), nbytes)
        self.parts = [
            whole[start : start + length] for start, length in zip(starts, lengths, strict=False)
        ]
        self._storage = whole.untyped_storage()
        del whole
        self._users = users(self._storage)

    @property
    def in_use(self) -> bool:
        """Whether somebody has a view of it, other than `parts`."""
        return users(self._storage) > self._users

    def drop(self) -> None:
        """Give the pages back; there are zeros from now on."""
        self._held.madvise(mmap.MADV_DONTNEED)


# One pool for all models: what one of them frees, another can use.
POOL = Pool()


def make(nbytes: int, device: torch.device) -> Range | Resized:
    """Memory that can be freed and had again."""
    # Where reserved addresses count as memory (ulimit -v), none can be kept for later.
    keeps_addresses = LIBC is not None and not is_limited(resource.RLIMIT_AS)
    if device.type == "cpu" and keeps_addresses and nbytes:
        return Range(nbytes, POOL)
    return Resized(nbytes, device)
