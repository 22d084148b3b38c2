"""Error feedback: what has not travelled of a gradient is added to the next one.

    sent = gradient + kept        kept = sent - unpack(pack(sent))

With momentum (Deep Gradient Compression), gradients gather momentum while they wait, and lose it
when they leave: it would carry a direction that is out of date.

    momentum = m * momentum + gradient        sent = kept + momentum
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from zerohvd.compression.codecs import Codec, PackArrays


class FeedbackArrays(PackArrays, Protocol):
    """The operations that error feedback needs besides."""

    def finite_or_zero(self, x: Any) -> Any:
        """`x`, with 0 where it is not finite: an overflow must not stay for ever."""

    def where_zero(self, of: Any, x: Any) -> Any:
        """`x` where `of` is 0; 0 elsewhere."""


class Waiting(NamedTuple):
    """What a rank keeps of its gradients: 1-D, float32."""

    kept: Any
    momentum: Any = None


class Packed(NamedTuple):
    data: Any  # 1-D, uint8
    waiting: Waiting  # for the next step


def pack_with_feedback(
    ops: FeedbackArrays, codec: Codec, grad: Any, before: Waiting, turn: Any, momentum: float = 0.0
) -> Packed:
    """Pack a gradient, 1-D float32, together with what waits."""
    speed = None
    if momentum:
        speed = before.momentum * momentum + grad
    sent = before.kept + (grad if speed is None else speed)
    data = codec.pack(ops, sent, turn)
    arrived = codec.unpack(ops, data, grad.shape[0], turn)
    kept = ops.finite_or_zero(sent - arrived)
    if speed is not None:
        speed = ops.finite_or_zero(ops.where_zero(arrived, speed))
    return Packed(data, Waiting(kept, speed))
