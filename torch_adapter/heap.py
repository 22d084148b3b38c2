"""What the C library does with large blocks that a step frees.

glibc asks the kernel for every block above 32 MiB, and gives it back as soon as it is freed. A
step makes and frees a few of those, the gradient of an embedding for one, and each time the kernel
finds and clears its pages anew: on a CPU several per cent of a step. Kept in the process, the
blocks of one step are there for the next.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from zerohvd.torch.pages import LIBC

SWITCH = "ZEROHVD_KEEP_MEMORY"

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT = 1 << 30  # free bytes at the heap's end that stay in the process
_LARGEST_ON_HEAP = 32 << 20  # what glibc's own threshold grows to
_lock = threading.Lock()
_keeping = False


def may_keep(environ: Mapping[str, str]) -> bool:
    """Whether the C library's settings are ours to choose."""
    if environ.get(SWITCH, "1") == "0":
        return False
    chosen = any(name.startswith("MALLOC_") and name.endswith("_") for name in environ)
    return not chosen and "glibc.malloc" not in environ.get("GLIBC_TUNABLES", "")


def keep() -> bool:
    """Let large blocks stay in the process when they are freed; whether they do now."""
    global _keeping
    with _lock:
        if LIBC is None or not hasattr(LIBC, "gnu_get_libc_version") or not may_keep(os.environ):
            return False
        if not _keeping:
            LIBC.mallopt(_MMAP_MAX, 0)
            LIBC.mallopt(_TRIM_THRESHOLD, _KEPT)
            _keeping = True
        return True


def give_back() -> None:
    """Give the kernel what is free now, between blocks in use too; the next step gets it anew."""
    if LIBC is not None and hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


def let_go() -> None:
    """Give freed blocks back to the kernel again, as the C library does when left alone."""
    global _keeping
    with _lock:
        if LIBC is not None and _keeping:
            LIBC.mallopt(_MMAP_MAX, 65536)
            LIBC.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
            LIBC.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_ON_HEAP)
            _keeping = False
    give_back()
