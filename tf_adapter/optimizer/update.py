"""The inner optimizer's update of this rank's pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from zerohvd.keras import compat
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.params.pieces import PieceVariable


class PieceUpdate:
    """Updates pieces one after the other, in one step.

    An update allocates several times the memory of what it updates, and TensorFlow would run the
    updates of all pieces at once.
    """

    def __init__(self, inner: keras.optimizers.Optimizer) -> None:
        self._inner = inner
        self._before: list[Any] = []

    def run(self, pieces: Sequence[PieceVariable], grads: Sequence[Any], rate: Any) -> None:
        """Let the inner optimizer change the pieces; their values are tensors afterwards."""
        # Keras leaves a variable without gradient alone, weight decay included.
        for grad, piece in zip(grads, pieces, strict=True):
            if grad is None:
                piece.load()
        chosen = [(g, p) for g, p in zip(grads, pieces, strict=True) if g is not None]
        if not chosen and not compat.updates_together(self._inner):
            return
        updated = [p for _, p in chosen]
        with self._in_order():
            compat.update_variables(self._inner, [g for g, _ in chosen], updated, rate)
        for piece in updated:
            piece.set(piece.read_value())

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Have the inner optimizer's update_step wait for the one before it."""
        inner = self._inner
        update = inner.update_step

        def update_step(grad: Any, piece: PieceVariable, rate: Any) -> None:
            with after(self._before):
                piece.load()
                compat.apply_weight_decay(inner, [piece])
                update(grad, piece, rate)
            self._before = [piece.read_value()]

        inner.update_step = update_step
        try:
            yield
        finally:
            del inner.update_step
