"""Numbers as people write and read them."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SIZE = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([KMGTP]?)(i?)B?\s*", re.IGNORECASE)


def parse_bytes(text: str | float) -> int:
    """The bytes of "16GiB" (units of 1024), "16GB" (units of 1000) or a number."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise TypeError(f"memory must be a size such as '16GiB' or a number of bytes, got {text!r}")
    found = _SIZE.fullmatch(str(text))
    try:
        if found is None:
            raise ValueError
        number, prefix, binary = float(found[1]), found[2].upper(), bool(found[3])
    except ValueError:
        raise ValueError(
            f"expected a size such as 16GiB, 40GB or 512MiB, got {str(text)!r}"
        ) from None
    power = "KMGTP".find(prefix) + 1 if prefix else 0
    size = number * (1024**power if binary else _UNITS[prefix])
    if not 0 < size < math.inf:
        raise ValueError(f"a size must be greater than 0, got {text!r}")
    return int(size)


def is_binary(text: str | float | None) -> bool:
    """Whether somebody who wrote this counts in units of 1024."""
    return isinstance(text, str) and bool(re.search(r"[KMGTP]i", text, re.IGNORECASE))


def parse_count(text: str) -> int:
    """A number of parameters: "7.5e9", "7.5B", "350M" or "1_000_000"."""
    scale = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
    body = text.strip().replace("_", "").replace(",", "")
    factor = scale.get(body[-1:].upper(), 1)
    try:
        value = float(body[:-1] if factor > 1 else body) * factor
    except ValueError:
        value = math.nan
    if not 1 <= value < 1e18:
        raise ValueError(f"expected a number of parameters such as 7.5e9 or 350M, got {text!r}")
    return round(value)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks: "8" or "8,16,64"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) < 10**7 for part in parts):
        raise ValueError(f"expected numbers of ranks such as 8 or 8,16,64, got {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def show_bytes(count: float, *, binary: bool = False) -> str:
    """ "31.4 GB", or "29.3 GiB" in units of 1024."""
    base, i = (1024, "i") if binary else (1000, "")
    if abs(count) < base:
        return f"{count:.0f} B"
    power = 1
    # With one decimal, 999.96 MB would be 1,000.0 MB.
    while power < 5 and abs(count) / base**power >= base - 0.05:
        power += 1
    unit = "KMGTP"[power - 1] if binary or power > 1 else "k"
    return f"{count / base**power:,.1f} {unit}{i}B"


def show_seconds(seconds: float) -> str:
    """ "1.2 ms", "3.4 s"."""
    for unit, scale in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
