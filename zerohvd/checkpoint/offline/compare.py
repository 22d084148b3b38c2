"""What differs between two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zerohvd.checkpoint import format as fmt
from zerohvd.checkpoint.entries import Want
from zerohvd.checkpoint.errors import reading
from zerohvd.checkpoint.manifest import TensorInfo
from zerohvd.checkpoint.reader import Reader
from zerohvd.layout import Span


class Difference(NamedTuple):
    """One thing that is not the same."""

    what: str  # key of a tensor, or "step", "state", ...
    how: str


def differences(
    a: Reader, b: Reader, each: Callable[[int], None] = lambda nbytes: None
) -> Iterator[Difference]:
    """Compare step, states and every element; how they were sharded does not matter.

    Args:
        a, b: The checkpoints.
        each: Told how many bytes of `a` have been compared since it was last called.
    """
    for reader in (a, b):
        reader.check_files()
    with reading(a.folder, f"compared with {b.folder}"):
        yield from _differences(a, b, each)


def _differences(
    a: Reader, b: Reader, each: Callable[[int], None]
) -> Iterator[Difference]:
    for field in ("framework", "step", "values"):
        ours, theirs = getattr(a.manifest, field), getattr(b.manifest, field)
        if ours != theirs:
            yield Difference(field, _say(ours, theirs))
    for key in sorted({*a.tensors, *b.tensors}):
        one, other = a.tensors.get(key), b.tensors.get(key)
        if one is None or other is None:
            yield Difference(key, f"only in the {'second' if one is None else 'first'}")
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            ours, theirs = f"{one.dtype} {one.shape}", f"{other.dtype} {other.shape}"
            yield Difference(key, _say(ours, theirs))
        else:
            how = _compare(a, b, one, each)
            if how:
                yield Difference(key, how)
            continue
        each(one.nbytes if one is not None else 0)


def _say(ours: Any, theirs: Any) -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
        return f"of {len(keys)} parameters, the first {keys[0]!r}"
    return f"{ours} in the first, {theirs} in the second"


def _compare(a: Reader, b: Reader, info: TensorInfo, each: Callable[[int], None]) -> str:
    """How the elements differ; empty if they do not."""
    step = max(1, fmt.CHUNK_BYTES // info.itemsize)
    differing, largest = 0, 0.0
    for start in range(0, info.numel, step):
        span = Span(start, min(info.numel, start + step))
        parts = []
        for reader in (a, b):
            part = np.empty(span.length * info.itemsize, np.uint8)
            reader.fill(Want(info.key, span, part.data))
            parts.append(part)
        each(parts[0].nbytes)
        if np.array_equal(parts[0], parts[1]):
            continue
        elements = [p.reshape(-1, info.itemsize) for p in parts]
        differing += int((elements[0] != elements[1]).any(axis=1).sum())
        x, y = (_numbers(p, info.dtype) for p in parts)
        with np.errstate(invalid="ignore"):
            largest = max(largest, float(np.nanmax(np.abs(x - y), initial=0.0)))
    if not differing:
        return ""
    return f"{differing} of {info.numel} elements differ, by up to {largest:.3g}"


def _numbers(data: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """As something to subtract; 8-bit floats by their bits."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("float8"):
        return data.astype(np.float64)
    numbers = data.view(np.dtype(dtype))
    return numbers if numbers.dtype.kind == "c" else numbers.astype(np.float64)
