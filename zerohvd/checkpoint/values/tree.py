"""Nested Python values as JSON, with their arrays beside it. No pickle: nothing in it can run.

What JSON cannot say is an object with one key that starts with "!": {"!tuple": [1, 2]}. An array
is {"!array": key, "of": library}, and is stored as a tensor under that key.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zerohvd.checkpoint.format import SAFETENSORS


class Array(NamedTuple):
    """An array of any library, as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]  # C-contiguous, of any numpy dtype of the same number of bytes
    of: str  # the library that decodes it: "numpy", "torch"


def encode(
    value: Any,
    prefix: str,
    arrays: dict[str, Array],
    to_array: Callable[[Any], Array | None] = lambda value: None,
) -> Any:
    """`value` as JSON can say it; its arrays go into `arrays`.

    Args:
        value: Numbers, strings, bytes, None, arrays, and tuples, lists, dicts and sets of them.
        prefix: Of the arrays' keys, and of the place that an error names.
        arrays: Collects what is stored beside the JSON.
        to_array: Knows the arrays of a framework, and returns None for anything else.
    """
    try:
        return _encode(value, prefix, arrays, to_array)
    except RecursionError:
        raise ValueError(
            f"something in {prefix} is nested too deeply, or contains itself"
        ) from None


def _encode(
    value: Any, prefix: str, arrays: dict[str, Array], to_array: Callable[[Any], Array | None]
) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic):
        return {"!scalar": [value.dtype.name, encode(value.item(), prefix, arrays)]}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"!float": repr(float(value))}
    if isinstance(value, complex):
        return {"!complex": [encode(v, prefix, arrays) for v in (value.real, value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"!bytes": base64.b64encode(value).decode()}
    array = _numpy(value, prefix) if isinstance(value, np.ndarray) else to_array(value)
    if array is not None:
        if array.dtype not in SAFETENSORS:
            raise _no_numbers(prefix, array.dtype)
        arrays[prefix] = array
        return {"!array": prefix, "of": array.of}

    def inside(part: Any, where: Any) -> Any:
        return _encode(part, f"{prefix}.{where}", arrays, to_array)

    if isinstance(value, (list, tuple, set, frozenset, deque)):
        ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        parts = [inside(v, i) for i, v in enumerate(ordered)]
        return parts if isinstance(value, list) else {f"!{_SEQUENCES[_kind(value)]}": parts}
    if isinstance(value, Mapping):
        return _encode_mapping(value, prefix, arrays, inside)
    raise TypeError(
        f"{prefix} is a {type(value).__name__}, which cannot be stored. Numbers, strings, arrays, "
        "and lists and dicts of them can; of an object pass what its state_dict() returns"
    )


_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "set", deque: "deque"}


def _kind(value: Any) -> type:
    return next(kind for kind in _SEQUENCES if isinstance(value, kind))


def _numpy(value: npt.NDArray[Any], where: str) -> Array:
    if value.dtype.kind not in "biufc":
        raise _no_numbers(where, value.dtype)
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return Array(value.dtype.name, value.shape, np.ascontiguousarray(little), "numpy")


def _no_numbers(where: str, dtype: Any) -> TypeError:
    return TypeError(
        f"{where} is an array of {dtype}, which cannot be stored; arrays of numbers can"
    )


def _encode_mapping(
    value: Mapping[Any, Any],
    prefix: str,
    arrays: dict[str, Array],
    inside: Callable[[Any, Any], Any],
) -> Any:
    tag = "!counter" if isinstance(value, Counter) else "!items"
    plain = all(isinstance(k, str) and not k.startswith("!") for k in value)
    if plain and tag == "!items":
        return {key: inside(v, key) for key, v in value.items()}
    return {tag: [[encode(k, f"{prefix}.key", arrays), inside(v, k)] for k, v in value.items()]}


def decode(value: Any, fetch: Callable[[Any, Any], Any]) -> Any:
    """What `encode` was given.

    Args:
        value: What it returned.
        fetch: The array of a key, for a library.
    """

    def inner(part: Any) -> Any:
        return decode(part, fetch)

    if isinstance(value, list):
        return [inner(v) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("!"):
        return {k: inner(v) for k, v in value.items()}
    held = value[tag]
    if tag == "!array":
        return fetch(held, value.get("of"))
    if tag not in _DECODERS:
        raise ValueError(f"a value is tagged {tag!r}, which this version does not know")
    if len(value) > 1 or not isinstance(held, str if tag in _TEXTS else list):
        raise ValueError(f"a value is tagged {tag!r}, but does not look like one")
    return _DECODERS[tag](held, inner)


def _scalar(held: list[Any], inner: Callable[[Any], Any]) -> Any:
    name, value = held
    dtype = np.dtype(str(name))
    if dtype.hasobject or dtype.itemsize > _LARGEST_SCALAR:
        raise ValueError(f"a number has the dtype {name!r}")
    return dtype.type(inner(value))


_LARGEST_SCALAR = 32  # bytes: complex256
_TEXTS = ("!float", "!bytes")
_DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "!tuple": lambda held, inner: tuple(inner(v) for v in held),
    "!set": lambda held, inner: {inner(v) for v in held},
    "!deque": lambda held, inner: deque(inner(v) for v in held),
    "!items": lambda held, inner: {inner(k): inner(v) for k, v in held},
    "!counter": lambda held, inner: Counter({inner(k): inner(v) for k, v in held}),
    "!float": lambda held, inner: float(held),
    "!bytes": lambda held, inner: base64.b64decode(held, validate=True),
    "!complex": lambda held, inner: complex(*(inner(v) for v in held)),
    "!scalar": _scalar,
}
