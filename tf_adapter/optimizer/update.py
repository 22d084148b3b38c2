"""The inner optimizer's update of this rank's pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.communication.recurring import recurring
from zerohvd.keras.params.pieces import PieceVariable

# Whether any rank has a gradient of a variable: True, or a tensor that will say so.
Given = Callable[[int], Any]


class PieceUpdate:
    """Updates pieces one after the other, in one step.

    An update allocates several times the memory of what it updates, and TensorFlow would run the
    updates of all pieces at once.

    Args:
        inner: The inner optimizer.
        alike: Whether updates of pieces of the same shape may share their operations in the graph:
            it must be known that an update leaves no tensor behind for the next one.
    """

    def __init__(self, inner: keras.optimizers.Optimizer, alike: bool = False) -> None:
        self._inner, self._alike = inner, alike
        self._before: list[Any] = []

    def run(
        self,
        pieces: Sequence[PieceVariable],
        grads: Sequence[Any],
        rate: Any,
        given: Given,
        mean: Callable[[Any, PieceVariable], Any] = lambda grad, _: grad,
    ) -> None:
        """Let the inner optimizer change the pieces; their values are tensors afterwards, unless
        the pieces say that they are stored.

        Args:
            pieces: What to update.
            grads: Their gradients; None where there is none.
            rate: The learning rate.
            given: Whether any rank has a gradient.
            mean: From what is in `grads` to the gradient that the optimizer gets.
        """
        # Keras leaves a variable without gradient alone, weight decay included.
        for grad, piece in zip(grads, pieces, strict=True):
            if grad is None:
                piece.load()
        chosen = [(g, p) for g, p in zip(grads, pieces, strict=True) if g is not None]
        if not chosen and not compat.updates_together(self._inner):
            return
        updated = [p for _, p in chosen]
        with self._in_order(given, mean):
            compat.update_variables(self._inner, [g for g, _ in chosen], updated, rate)
        for piece in updated:
            if not piece.is_stored:
                piece.set(piece.read_value())

    @contextlib.contextmanager
    def _in_order(self, given: Given, mean: Callable[..., Any]) -> Iterator[None]:
        """Have the inner optimizer's update_step wait for the one before it, and leave alone what
        no rank has a gradient of."""
        inner = self._inner
        original = inner.update_step

        def update(grad: Any, piece: PieceVariable, rate: Any) -> None:
            original(mean(grad, piece), piece, rate)

        def update_step(grad: Any, piece: PieceVariable, rate: Any) -> None:
            def change() -> Any:
                compat.apply_weight_decay(inner, [piece])
                update(grad, piece, rate)
                return piece.read_value()

            with after(self._before):
                due = given(piece.piece.param)
                if due is True and self._alike:
                    self._change_alike(piece, grad, rate, update)
                else:
                    piece.load()
                    value = piece.read_value()
                    piece.assign(change() if due is True else tf.cond(due, change, lambda: value))
            self._before = [piece.read_value()]

        inner.update_step = update_step
        try:
            yield
        finally:
            del inner.update_step

    def _change_alike(self, piece: PieceVariable, grad: Any, rate: Any, update: Any) -> None:
        """Update a piece by operations that pieces of its shape share."""

        def change(grad: Any, *value: Any) -> list[Any]:
            if value:
                piece.assign(*value)
            compat.apply_weight_decay(self._inner, [piece])
            update(grad, piece, rate)
            return [] if piece.is_stored else [piece.read_value()]

        if piece.can_change_in_place:
            with piece.in_place():
                recurring(change, [grad])
        else:
            piece.load()
            piece.assign(*recurring(change, [grad, piece.read_value()]))
