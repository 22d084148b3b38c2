"""Whether a stored value can take the place of one that is here.

States of schedulers, scalers and parameter groups are whatever their classes say. A stored one is
of the same make: numbers for numbers, texts for texts, and so on inside. None goes with anything,
and so does a type that is not known here.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from zerohvd.checkpoint.errors import CheckpointMismatchError
from zerohvd.checkpoint.values.document import brief


def check_state(stored: Any, of: Any, where: str) -> None:
    """Raise unless `stored` looks like what `of.state_dict()` returns.

    A name that the object has, but does not store, is refused: many objects take over whatever
    they are given, methods included.
    """
    if not isinstance(stored, Mapping):
        raise _wrong(where, stored, "a dict")
    present = of.state_dict()
    if not isinstance(present, Mapping):
        return
    for key, value in stored.items():
        if key in present:
            check(value, present[key], f"{where}.{key}")
        elif not isinstance(key, str) or hasattr(of, key):
            raise CheckpointMismatchError(f"{where} holds {key!r}, which is no state of {type(of)}")


def check(stored: Any, present: Any, where: str) -> None:
    """Raise unless `stored` is of the make of `present`."""
    if stored is None or present is None:
        return
    expected = _make(present)
    if expected is None:
        return
    if _make(stored) != expected:
        raise _wrong(where, stored, expected)
    if expected == "a dict":
        for key in stored.keys() & present.keys():
            check(stored[key], present[key], f"{where}.{key}")
    if expected == "a sequence" and len(stored) == len(present):
        for index, (one, other) in enumerate(zip(stored, present, strict=True)):
            check(one, other, f"{where}.{index}")


def check_options(stored: Any, present: Mapping[str, Any], where: str) -> None:
    """The same for the options of a parameter group, in which no number may be NaN."""
    if not isinstance(stored, Mapping):
        raise _wrong(where, stored, "a dict")
    for key, value in stored.items():
        if not isinstance(key, str) or key in ("params", "param_names"):
            raise CheckpointMismatchError(f"{where} holds {key!r}, which is no option")
        check(value, present.get(key), f"{where}.{key}")
        if isinstance(present.get(key), bool) and not isinstance(value, (bool, type(None))):
            raise _wrong(f"{where}.{key}", value, "true or false")
        if isinstance(present.get(key), tuple) and len(value or ()) != len(present[key]):
            raise _wrong(f"{where}.{key}", value, f"a tuple of {len(present[key])}")
        _check_no_nan(value, f"{where}.{key}")


def _check_no_nan(value: Any, where: str) -> None:
    if isinstance(value, (tuple, list)):
        for index, inside in enumerate(value):
            _check_no_nan(inside, f"{where}.{index}")
    elif _make(value) == "a number" and bool(value != value):
        raise _wrong(where, value, "a number")


def check_number(value: Any, where: str) -> None:
    if _make(value) != "a number":
        raise _wrong(where, value, "a number")


def check_finite(value: Any, where: str) -> None:
    """Raise unless it is a number, and neither NaN nor infinite."""
    try:
        finite = _make(value) == "a number" and math.isfinite(abs(complex(value)))
    except OverflowError:  # an integer that no float comes near
        finite = False
    if not finite:
        raise _wrong(where, value, "a finite number")


def _make(value: Any) -> str | None:
    if isinstance(value, (numbers.Number, bool)) or getattr(value, "shape", None) == ():
        return "a number"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, Mapping):
        return "a dict"
    if hasattr(value, "shape"):
        return "an array"
    return "a sequence" if isinstance(value, Sequence) else None


def _wrong(where: str, stored: Any, expected: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{where} should be {expected} in the checkpoint, not {brief(stored)}"
    )
