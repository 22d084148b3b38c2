"""When the collectives of a step ran: measured inside of the graph, where Python does not look on.

Two timestamps stand around every collective: when its input was there, and when its result was.
They end in one variable, which is read once per step. No operation of the step waits for them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.communication.ordering import after

_ROWS = 1024  # collectives of a step; those behind are not measured
_GRADIENTS = 0  # the row of the time at which all gradients were computed


class Times(NamedTuple):
    """Of one step, by `time.time`."""

    gradients: float  # when all of them were computed
    collectives: dict[str, tuple[float, float]]  # by name: when it began and ended


class Clock:
    """Measures the collectives of one optimizer's steps.

    Attributes:
        square: The sum of the squares of this rank's reduced gradients, in steps of which a record
            is made.
        has_squares: Whether that is known of all gradients.
    """

    def __init__(self) -> None:
        self._is_due = False
        self._rows: dict[str, int] = {}
        self.has_squares = False
        with compat.outside_of_traces(), tf.device("CPU"):
            zeros = tf.zeros([_ROWS, 2], tf.float64)
            self._times = tf.Variable(zeros, trainable=False, name="times")
            self._due = tf.Variable(False, trainable=False, name="due")
            self.square = tf.Variable(0.0, trainable=False, name="square", dtype=tf.float64)

    # -- inside of a step --------------------------------------------------------------------------

    @contextlib.contextmanager
    def around(self, name: str, x: Any, results: list[Any]) -> Iterator[None]:
        """Measure a collective on `x`, whose results are put into the list inside."""
        with after(x):
            start = tf.timestamp()
        yield
        row = self._rows.setdefault(name, len(self._rows) + 1)
        if row < _ROWS:
            with after(results):
                self._write(row, start, tf.timestamp())

    def _write(self, row: int, start: Any, stop: Any) -> None:
        self._times.scatter_nd_update([[row, 0], [row, 1]], tf.stack([start, stop]))

    def begin(self, grads: Sequence[Any]) -> None:
        """The gradients are there once these tensors are."""
        self.has_squares = True
        with after([g for g in grads if g is not None]):
            now = tf.timestamp()
            self._write(_GRADIENTS, now, now)
            self.square.assign(0.0)

    def add_squares(self, grads: Sequence[Any]) -> None:
        """Add reduced gradients to `square`, if a record is made of this step."""
        found = [g for g in grads if g is not None]
        if any(isinstance(g, tf.IndexedSlices) for g in found):
            self.has_squares = False
        if not found or not self.has_squares:
            return

        def add() -> Any:
            sums = [tf.reduce_sum(tf.square(tf.cast(g, tf.float32))) for g in found]
            return tf.cast(tf.add_n(sums), tf.float64)

        self.square.assign_add(tf.cond(self._due, add, lambda: tf.constant(0.0, tf.float64)))

    # -- between steps -----------------------------------------------------------------------------

    def expect(self, due: bool) -> None:
        """Say whether a record will be made of the next step."""
        if due != self._is_due:
            self._is_due = due
            self._due.assign(due)

    def read(self) -> Times:
        """The times of the latest step; of collectives that it did not run, older ones."""
        rows = self._times.numpy()
        known = {name: row for name, row in self._rows.items() if row < _ROWS}
        spans = {name: (float(rows[row, 0]), float(rows[row, 1])) for name, row in known.items()}
        return Times(float(rows[_GRADIENTS, 0]), spans)


def measured(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let the clock of a Wire measure one of its collectives, if it has one."""
    place = list(inspect.signature(method).parameters).index("name")

    @functools.wraps(method)
    def run(wire: Any, x: Any, *args: Any, **options: Any) -> Any:
        if wire.clock is None or wire.size == 1:
            return method(wire, x, *args, **options)
        name = options["name"] if "name" in options else args[place - 2]
        results: list[Any] = []
        with wire.clock.around(name, x, results):
            found = method(wire, x, *args, **options)
            results.append(found)
        return found

    return run
