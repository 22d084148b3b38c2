"""What the C library does with large blocks: who keeps them when they are freed.

Left alone, glibc takes blocks of up to 32 MiB from its heap and asks the kernel for larger ones,
which go back as soon as they are freed. Both can be wrong. A step on a CPU makes and frees a few
very large blocks, the gradient of an embedding for one, and the kernel finds and clears their pages
anew each time: several per cent of a step. And blocks freed inside the heap leave gaps; where
small ones that stay keep the gaps from being used again, a model that would fit does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from zerohvd.torch.pages import LIBC, is_counted

SWITCH = "ZEROHVD_MALLOC"

# Options of mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT = 1 << 30  # free bytes at the end of the heap
_MAPPED_FROM = 256 << 10
_OWN_LIMIT = 32 << 20  # where glibc's own threshold ends up
_ANY_NUMBER = 1 << 16


def is_ours(environ: Mapping[str, str]) -> bool:
    """Whether the settings are ours to choose: nobody has chosen any, or said to leave them."""
    if environ.get(SWITCH, "1") == "0":
        return False
    chosen = any(name.startswith("MALLOC_") and name.endswith("_") for name in environ)
    return not chosen and "glibc.malloc" not in environ.get("GLIBC_TUNABLES", "")


def keep_large() -> None:
    """Large blocks stay in the process when they are freed: fast."""
    if not is_counted():
        _set(mapped=0, threshold=_OWN_LIMIT, trim=_KEPT)


def map_large() -> None:
    """Large blocks are mapped one by one, and are gone when they are freed: small."""
    _set(mapped=_ANY_NUMBER, threshold=_MAPPED_FROM, trim=_MAPPED_FROM)


def leave_alone() -> None:
    """As glibc does it by itself."""
    _set(mapped=_ANY_NUMBER, threshold=_OWN_LIMIT, trim=2 * _OWN_LIMIT)
    give_back()


def give_back() -> None:
    """The kernel gets what is free now, gaps too; the next step asks for it anew."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


def _set(*, mapped: int, threshold: int, trim: int) -> None:
    if hasattr(LIBC, "gnu_get_libc_version") and is_ours(os.environ):
        LIBC.mallopt(_MMAP_MAX, mapped)
        LIBC.mallopt(_MMAP_THRESHOLD, threshold)
        LIBC.mallopt(_TRIM_THRESHOLD, trim)
