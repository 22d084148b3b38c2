"""The inner optimizer's update of this rank's pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.params.pieces import PieceVariable

# Whether any rank has a gradient of a variable: True, or a tensor that will say so.
Given = Callable[[int], Any]


class PieceUpdate:
    """Updates pieces one after the other, in one step.

    An update allocates several times the memory of what it updates, and TensorFlow would run the
    updates of all pieces at once.
    """

    def __init__(self, inner: keras.optimizers.Optimizer) -> None:
        self._inner = inner
        self._before: list[Any] = []

    def run(
        self, pieces: Sequence[PieceVariable], grads: Sequence[Any], rate: Any, given: Given
    ) -> None:
        """Let the inner optimizer change the pieces; their values are tensors afterwards."""
        # Keras leaves a variable without gradient alone, weight decay included.
        for grad, piece in zip(grads, pieces, strict=True):
            if grad is None:
                piece.load()
        chosen = [(g, p) for g, p in zip(grads, pieces, strict=True) if g is not None]
        if not chosen and not compat.updates_together(self._inner):
            return
        updated = [p for _, p in chosen]
        with self._in_order(given):
            compat.update_variables(self._inner, [g for g, _ in chosen], updated, rate)
        for piece in updated:
            piece.set(piece.read_value())

    @contextlib.contextmanager
    def _in_order(self, given: Given) -> Iterator[None]:
        """Have the inner optimizer's update_step wait for the one before it, and leave alone what
        no rank has a gradient of."""
        inner = self._inner
        update = inner.update_step

        def update_step(grad: Any, piece: PieceVariable, rate: Any) -> None:
            def change() -> Any:
                compat.apply_weight_decay(inner, [piece])
                update(grad, piece, rate)
                return piece.read_value()

            with after(self._before):
                piece.load()
                due, value = given(piece.piece.param), piece.read_value()
                piece.assign(change() if due is True else tf.cond(due, change, lambda: value))
            self._before = [piece.read_value()]

        inner.update_step = update_step
        try:
            yield
        finally:
            del inner.update_step
