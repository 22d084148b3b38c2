"""What this rank stores of a model and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from zerohvd.checkpoint.entries import Entry
from zerohvd.checkpoint.matching import BUFFER, LOCAL_GRAD, MASTER, PARAM, own_name, state_kind
from zerohvd.checkpoint.values import generators
from zerohvd.checkpoint.values.tree import Array
from zerohvd.keras import compat
from zerohvd.keras.checkpoint.holdings import Holdings
from zerohvd.keras.optimizer import state
from zerohvd.keras.params.pieces import shard_of
from zerohvd.layout import Span


class KerasSnapshot:
    """Implements `zerohvd.checkpoint.session.Snapshot`."""

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._step = None if held.optimizer is None else held.optimizer.step
        self.replicated = self._step is not None and self._step.layout.size == 1

    def pieces(self) -> Iterator[Entry]:
        for piece in () if self._step is None else self._step.pieces:
            span = Span(*piece.piece.param_span)
            spec = piece.spec
            data = _reader(piece.read)
            yield Entry(PARAM, spec.name, spec.dtype, tuple(spec.shape), span, data)
        for name, variable in self._held.frozen.items():
            shard = shard_of(variable)
            if shard.span.length:
                yield _entry(PARAM, name, tuple(variable.shape), shard.span, shard.piece)
        for slot in () if self._step is None else state.slots(self._held.optimizer):
            kind = MASTER if slot.kind == state.MASTER else state_kind(slot.kind)
            yield _slot_entry(kind, slot)

    def copies(self) -> Iterator[Entry]:
        """Variables without elements: they have no owner, but belong to the model."""
        if self._step is not None:
            for spec, native in zip(self._step.layout.params, self._step.natives, strict=True):
                if spec.numel == 0:
                    yield _whole_entry(PARAM, spec.name, native)

    def variants(self) -> Iterator[Entry]:
        frozen = self._held.trainable_others
        for name, variable in self._held.others.items():
            yield _whole_entry(PARAM if name in frozen else BUFFER, name, variable)

    def own(self, rank: int) -> Iterator[Entry]:
        """Gradients that stages 0 and 1 add up on each rank before they are reduced."""
        if self._step is not None:
            for spec, total in zip(self._step.layout.params, self._step.local_sums, strict=False):
                yield _whole_entry(LOCAL_GRAD, own_name(spec.name, rank), total)

    def values(self, rank: int) -> dict[str, dict[str, Any]]:
        return {}

    def config(self) -> dict[str, Any]:
        if self._step is None:
            return {}
        return {**self._held.optimizer.config.as_dict(), "size": self._step.wire.size}

    def given(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "weights_h5": self._held.places,
            "unplaced": self._held.unplaced,
            "aliases": {},
        }
        if self._step is not None:
            found["optimizer"] = type(self._held.optimizer.inner_optimizer).__name__
            found["scalars"] = {k: _scalar(v) for k, v in self._held.scalars.items()}
        return found

    def generators(self) -> dict[str, Any]:
        """Layers keep their own generators, as variables."""
        found = generators.states()
        if compat.global_seed() is not None:
            found["keras"] = np.asarray(compat.global_seed().state)
        return found

    def counted_steps(self) -> int | None:
        return None if self._step is None else int(np.asarray(self._held.optimizer.iterations))


def _slot_entry(kind: str, slot: state.PieceSlot) -> Entry:
    spec, span = slot.piece.spec, Span(*slot.piece.piece.param_span)
    if slot.piece.whole and tuple(slot.variable.shape) != tuple(spec.shape):
        return _whole_entry(kind, spec.name, slot.variable)
    slot.check_divisible()
    return _entry(kind, spec.name, tuple(spec.shape), span, slot.variable)


def _entry(kind: str, name: str, shape: tuple[int, ...], span: Span, value: Any) -> Entry:
    """A range of a tensor; its bytes are copied out of TensorFlow when they are written."""
    dtype = tf.as_dtype(value.dtype).base_dtype.name
    return Entry(kind, name, dtype, shape, span, _reader(lambda: value))


def _whole_entry(kind: str, name: str, value: Any) -> Entry:
    shape = tuple(value.shape)
    return _entry(kind, name, shape, Span(0, math.prod(shape)), value)


def _reader(get: Any) -> Any:
    def read() -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(get().numpy()).reshape(-1).view(np.uint8)

    return read


def _scalar(variable: Any) -> Any:
    value = _wide(np.asarray(variable))
    return value[()] if value.ndim == 0 else value


def to_array(value: Any) -> Array | None:
    """For `tree.encode`: tensors and variables come back as arrays."""
    if not tf.is_tensor(value) and not isinstance(value, keras.Variable):
        return None
    array = _wide(np.asarray(value))
    return Array(array.dtype.name, array.shape, np.ascontiguousarray(array), "numpy")


def _wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """numpy alone has no bfloat16; float32 holds all of its values."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
