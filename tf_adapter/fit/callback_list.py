"""The callbacks that `fit` was called with, and others around them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras


def given_callbacks(given: dict[str, Any]) -> list[Any]:
    """The callbacks in the arguments of a call."""
    callbacks = given.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(keras.tree.flatten(callbacks or []))


@contextlib.contextmanager
def with_callbacks(
    given: dict[str, Any], before: Sequence[Any], after: Sequence[Any] = ()
) -> Iterator[None]:
    """Add callbacks to the arguments of a call; a CallbackList is as it was afterwards."""
    callbacks = given.get("callbacks")
    found = given_callbacks(given)
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        if before or after:
            given["callbacks"] = [*before, *found, *after]
        yield
        return
    callbacks.callbacks[:] = [*before, *found, *after]
    try:
        yield
    finally:
        callbacks.callbacks[:] = found
