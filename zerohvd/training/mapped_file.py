"""Memory that lies in a file without a name."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
from pathlib import Path
from typing import Any

_numbers = itertools.count()

# A mapping does not need its file descriptor, of which a process has about a thousand. Before
# Python 3.13 it keeps one nevertheless.
_MAP_OPTIONS: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def map_unnamed(folder: Path, size: int, what: str) -> mmap.mmap:
    """Map `size` bytes of a new file in `folder`, which vanishes with the mapping.

    Raises:
        OSError: There is no room; it says that the room was for `what`.
    """
    name = folder / f"zerohvd-{os.getpid()}-{next(_numbers)}"
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # A sparse file on a full disk would end the process by a signal, at some later write.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size, **_MAP_OPTIONS)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot reserve {size} bytes for {what} in {folder} ({error.strerror}); give a path "
            "with more room",
        ) from error
    finally:
        os.close(descriptor)
        name.unlink(missing_ok=True)
