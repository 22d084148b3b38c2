"""In which order a step's operations run: TensorFlow starts whatever it can at once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from zerohvd.layout import Layout
from zerohvd.training.graph import IN_FLIGHT, buckets_alone


def after(*done: Any) -> contextlib.AbstractContextManager[Any]:
    """A context whose operations wait for `done`: operations and nested lists of them.

    Eager operations wait anyway, and eager assigns return None.
    """
    return tf.control_dependencies([] if tf.executing_eagerly() else _flatten(done))


def _flatten(done: Any) -> list[Any]:
    if isinstance(done, (list, tuple)):
        return [t for d in done for t in _flatten(d)]
    return [] if done is None else [done]


class Window:
    """Limits how many buckets are in flight."""

    def __init__(self, layout: Layout) -> None:
        self._alone = buckets_alone(layout)

    def after(self, started: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """A context that waits until there is room beside `started`, one entry per bucket."""
        ahead = 1 if len(started) < self._alone else IN_FLIGHT
        last = started[len(started) - ahead :][:1] if len(started) >= ahead else []
        return after(last)
