"""How much more memory a call takes, at its worst moment, than there was before it."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path


def peak_growth(act: Callable[[], object]) -> int:
    """In bytes, of this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would hide what is taken now
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    act()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024
