"""Packed gradients and parameters inside a traced step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from zerohvd.compression.codecs import Codec, codec_of
from zerohvd.compression.feedback import Waiting, pack_with_feedback
from zerohvd.compression.policies import Blocks, Policy, TopK, keeps_errors
from zerohvd.keras import compat
from zerohvd.keras.communication import arrays
from zerohvd.keras.communication.packed import operations


class Exchange(Protocol):
    """Sends each part to its rank, but not the own one; returns what came, in the same order."""

    def __call__(self, parts: Sequence[Any], nbytes: int, name: str) -> list[Any]: ...


class GradPacking:
    """A reducescatter of packed gradients, with what waits for the next step.

    Args:
        policy: How gradients are packed.
        turn: The number of the step, an integer variable.
    """

    def __init__(self, policy: Policy, turn: Any) -> None:
        codec = codec_of(policy)
        assert codec is not None
        self._policy, self._codec, self._turn = policy, codec, turn
        self._momentum = policy.momentum if isinstance(policy, TopK) else 0.0
        # Rounding errors are small numbers of which a few digits matter.
        self._dtype = tf.bfloat16 if isinstance(policy, Blocks) else tf.float32
        self._waiting: dict[str, list[tf.Variable]] = {}  # by the name of the collective

    def reducescatter(
        self, exchange: Exchange, x: Any, lengths: Sequence[int], own: int, name: str
    ) -> Any:
        """The sum over the ranks of the part `own` of `x`, in float32."""
        turn = tf.convert_to_tensor(self._turn)
        starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
        packs = [n > 0 and not (r == own and self._codec.keeps_own) for r, n in enumerate(lengths)]
        x, waiting = self._clipped(x), self._waits(name, x)
        kept: list[list[Any]] = [[] for _ in waiting]
        parts: list[Any] = []
        for start, length, wanted in zip(starts, lengths, packs, strict=True):
            cuts = [arrays.cut(t, start, start + length) for t in (x, *waiting)]
            grad, *before = (tf.cast(t, tf.float32) for t in cuts)
            data, after = None, Waiting(*before) if before else None
            if wanted and before:
                data, after = pack_with_feedback(
                    operations, self._codec, grad, Waiting(*before), turn, self._momentum
                )
            elif wanted:
                data = self._codec.pack(operations, grad, turn)
            parts.append(data)
            for values, value in zip(kept, after or (), strict=False):
                values.append(value)
        for variable, values in zip(waiting, kept, strict=True):
            variable.assign(tf.cast(tf.concat(values, 0), variable.dtype))
        received = exchange(parts, self._codec.nbytes(lengths[own]), name)
        if not lengths[own]:
            # Nothing, but it waits for the exchange.
            return tf.cast(next(data for data in received if data is not None), tf.float32)
        mine = arrays.cut(x, starts[own], starts[own] + lengths[own])
        received[own] = parts[own]
        return self._total(received, mine, turn)

    def _total(self, received: Sequence[Any], mine: Any, turn: Any) -> Any:
        """Added in order; the own part is as it is where it was not packed."""
        total = None
        for data in received:
            if data is None:
                part = tf.cast(mine, tf.float32)
            else:
                part = self._codec.unpack(operations, data, mine.shape[0], turn)
            total = part if total is None else total + part
        return total

    def _waits(self, name: str, x: Any) -> list[tf.Variable]:
        """What is kept of the gradients of one bucket."""
        if not keeps_errors(self._policy):
            return []
        if name not in self._waiting:
            with compat.outside_of_traces():
                self._waiting[name] = [
                    tf.Variable(tf.zeros(x.shape, self._dtype), trainable=False, name="waiting")
                    for _ in range(2 if self._momentum else 1)
                ]
        return self._waiting[name]

    def forget(self) -> None:
        """Drop what waits."""
        for variable in (v for found in self._waiting.values() for v in found):
            variable.assign(tf.zeros_like(variable))

    @property
    def variables(self) -> list[tf.Variable]:
        return [v for found in self._waiting.values() for v in found]

    def _clipped(self, x: Any) -> Any:
        """For `TopK.clip`: what is not finite stays so."""
        if not isinstance(self._policy, TopK) or self._policy.clip is None:
            return x
        norm = tf.norm(tf.cast(x, tf.float32))
        factor = tf.minimum(1.0, self._policy.clip / (norm + 1e-6))
        return x * tf.cast(tf.where(tf.math.is_finite(norm), factor, 1.0), x.dtype)


def unpack_all(codec: Codec, data: Any, lengths: Sequence[int]) -> Any:
    """The numbers of all ranks, which have packed `lengths` of them: 1-D float32."""
    found, at = [], 0
    for length in lengths:
        size = codec.nbytes(length)
        if length:
            found.append(codec.unpack(operations, data[at : at + size], length, 0))
        at += size
    return operations.concat(found)


def pack(codec: Codec, x: Any) -> Any:
    """A 1-D tensor as uint8."""
    if not x.shape[0]:
        return tf.zeros([0], tf.uint8)
    return codec.pack(operations, tf.cast(x, tf.float32), 0)
