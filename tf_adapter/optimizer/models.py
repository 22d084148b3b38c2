"""What the optimizer knows of its model; the patches of `Model.compile` tell it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

_models: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_loading = [0]  # calls of load_model in progress


def compiled_with(model: Any, optimizer: Any) -> None:
    """Remember that `model` was compiled with `optimizer`."""
    _models[optimizer] = weakref.ref(model)


def other_state(optimizer: Any) -> list[Any]:
    """The statistics of the optimizer's model, which must start alike on all ranks; no seeds, which
    are integers and should differ."""
    found = _models.get(optimizer)
    model = found() if found is not None else None
    variables = () if model is None else model.non_trainable_variables
    return [v for v in variables if "float" in str(v.dtype)]


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """`load_model` is compiling a model inside."""
    _loading[0] += 1
    try:
        yield
    finally:
        _loading[0] -= 1


def is_loading() -> bool:
    """Whether `load_model` is compiling a model on this rank, and perhaps on no other."""
    return _loading[0] > 0
