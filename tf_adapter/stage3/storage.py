"""The memory of a unit: this rank's parts of its variables, bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.communication.wire import Wire
from zerohvd.keras.params import buffers
from zerohvd.keras.params.pieces import shard_of
from zerohvd.keras.stage3.placeholder import Home, Shard, hide
from zerohvd.layout import Bucket, Layout, Span

# Elements that are broadcast at once when first values are given out.
_BROADCAST = 1 << 22


class UnitBucket:
    """Sharded variables that travel together.

    Args:
        layout: The layout that the bucket belongs to.
        bucket: The bucket.
        variables: All of the layout's, in its order.
        wire: The ranks.
        reduce_dtype: Gradients are sent in this dtype; None: in the bucket's.
    """

    def __init__(
        self,
        layout: Layout,
        bucket: Bucket,
        variables: Sequence[Any],
        wire: Wire,
        reduce_dtype: str | None = None,
    ) -> None:
        self.bucket, self._wire = bucket, wire
        self.variables = [variables[slot.param] for slot in bucket.slots]
        self.name = layout.params[bucket.slots[0].param].name
        self._names = [layout.params[slot.param].name for slot in bucket.slots]
        self._dtype = tf.as_dtype(reduce_dtype or bucket.dtype)
        # Its own references: a model may be sharded anew, and its variables store others then.
        self._pieces: list[tf.Variable] = []
        rank = wire.rank if layout.size > 1 else 0
        self._rank, self._start = rank, bucket.span(rank).start
        # What this rank owns of each slot, in the bucket; empty where it owns nothing.
        self._held = [slot.span.intersect(bucket.span(rank)) for slot in bucket.slots]
        for slot, name in zip(bucket.slots, self._names, strict=True):
            if slot.length != layout.params[slot.param].numel:
                raise ValueError(
                    f"variable {name!r} has more elements than one collective can move "
                    f"({layout.params[slot.param].numel}): split it into several variables"
                )

    @property
    def nbytes(self) -> int:
        return self.bucket.nbytes

    def spans_of(self, place: int) -> list[Span]:
        """What every rank has of a variable of the bucket, in the flattened variable."""
        slot = self.bucket.slots[place]
        held = [slot.span.intersect(span) for span in self.bucket.spans()]
        return [s.shift(slot.param_start - slot.start) for s in held]

    # -- from whole variables to this rank's parts ------------------------------------------------

    def fill(self, home: Home, *, broadcast: bool) -> None:
        """Take this rank's parts of the variables' values and free the rest. All ranks call it.

        With `broadcast`, the first rank's values are everybody's.
        """
        keys = [_key(v) for v in self.variables]
        shard = self._first_shard(broadcast)
        for variable, name, slot, held, (key, native) in zip(
            self.variables, self._names, self.bucket.slots, self._held, keys, strict=True
        ):
            span = held.shift(slot.param_start - slot.start) if held.length else Span(0, 0)
            with tf.init_scope():
                own = held.shift(-self._start)
                first = shard[own.start : own.stop] if held.length else shard[:0]
                if own != (0, shard.shape[0]):
                    first = tf.identity(first)
                piece = tf.Variable(first, name=variable.name, trainable=True)
            self._pieces.append(piece)
            hide(variable, Shard(name, span, piece, home, key, native))

    def _first_shard(self, broadcast: bool) -> Any:
        """This rank's shard of the variables' first values. All ranks call it."""
        span = self.bucket.span(self._rank)
        values = self._sharded_values()
        if values is not None or not broadcast or self._wire.size == 1:
            packed = self.pack(self._own_values() if values is None else values)
            return tf.identity(packed[span.start : span.stop])
        packed = None if self._wire.rank else self.pack(self._own_values())
        # In parts: only the first rank ever holds the bucket whole.
        parts = [tf.zeros([0], self.bucket.dtype)]
        for start in range(0, self.bucket.padded, _BROADCAST):
            part = Span(start, min(start + _BROADCAST, self.bucket.padded))
            sent = tf.zeros([part.length], self.bucket.dtype)
            if packed is not None:
                sent = tf.identity(packed[part.start : part.stop])
            name = f"{self._wire.prefix}/u/init/{start}/{self.name}"
            got = self._wire.eager.broadcast(sent, 0, name=name)
            own = part.intersect(span)
            if own.length and packed is None:
                parts.append(got[own.start - part.start : own.stop - part.start])
        # A copy: a slice would keep the bucket alive.
        return tf.concat(parts, 0) if packed is None else packed[span.start : span.stop] + 0

    def _own_values(self) -> list[Any]:
        return [compat.first_value(variable) for variable in self.variables]

    def _sharded_values(self) -> list[Any] | None:
        """The values of variables that have been sharded before, in another way; None: they have
        not. All ranks call it."""
        shards = [shard_of(variable) for variable in self.variables]
        if None in shards:
            return None
        gathered: dict[int, list[Any]] = {}
        found = []
        for variable, shard in zip(self.variables, shards, strict=True):
            old = shard.home.bucket_of(variable)
            if id(old) not in gathered:
                gathered[id(old)] = old.gather(old.pieces(), "zero/u/again", [])
            place = [v is variable for v in old.variables].index(True)
            found.append(gathered[id(old)][place])
        return found

    def put(self, packed: Any) -> list[Any]:
        """Store this rank's parts of a whole bucket; returns operations to wait for."""
        return [
            piece.assign(packed[held.start : held.stop], read_value=False)
            for piece, held in zip(self._pieces, self._held, strict=True)
        ]

    def pack(self, values: Sequence[Any]) -> Any:
        """A whole bucket, of whole values."""
        flats = {
            slot.param: tf.reshape(value, [-1])
            for slot, value in zip(self.bucket.slots, values, strict=True)
        }
        return buffers.pack(self.bucket, flats, self.bucket.dtype)

    # -- collectives ------------------------------------------------------------------------------

    def pieces(self) -> list[Any]:
        """This rank's parts, as tensors that gradients can be taken of."""
        return [tf.convert_to_tensor(piece) for piece in self._pieces]

    def gather(self, pieces: Sequence[Any], name: str, wait_for: Sequence[Any]) -> list[Any]:
        """The whole variables, from all ranks' pieces; it starts after `wait_for`."""
        with after(wait_for):
            held = [
                (tf.identity(piece), span)
                for piece, span in zip(pieces, self._held, strict=True)
                if span.length
            ]
            values, spans = [p for p, _ in held], [s for _, s in held]
            shard = buffers.pack_shard(self.bucket, self._rank, values, spans)
            if not held:
                shard = self._wire.live(shard)
        full = self._wire.allgather(shard, self.bucket.lengths, self.op_name(name))
        return [
            tf.reshape(buffers.cut(full, slot.span), variable.shape)
            for slot, variable in zip(self.bucket.slots, self.variables, strict=True)
        ]

    def reduce(
        self, grads: Sequence[Any], name: str, weigh: Callable[[Any], Any], wait_for: Sequence[Any]
    ) -> list[Any]:
        """This rank's parts of the sum over the ranks of the variables' gradients."""
        # TensorFlow may not know the shape of a gradient, as of an einsum on an unknown batch.
        flats = {
            slot.param: tf.reshape(tf.convert_to_tensor(grad), [math.prod(variable.shape)])
            for slot, variable, grad in zip(self.bucket.slots, self.variables, grads, strict=True)
            if grad is not None
        }
        packed = weigh(buffers.pack(self.bucket, flats, self._dtype))
        with after(wait_for):
            packed = tf.identity(packed) if flats else self._wire.live(packed)
        reduced = self._wire.reducescatter(packed, self.bucket.lengths, self.op_name(name))
        # A rank that owns nothing here would prune it, and the others wait.
        self._wire.keep(reduced)
        return [reduced[h.start - self._start : h.stop - self._start] for h in self._held]

    def op_name(self, name: str) -> str:
        """The name of a collective on the bucket, with that of its first variable."""
        return name + "/" + "".join(c if c.isalnum() or c in "._-" else "." for c in self.name)


def _key(variable: Any) -> tuple[str, str]:
    """What Keras' optimizers know a variable by: its key, and its name in TensorFlow."""
    shard = shard_of(variable)
    if shard is not None:
        return str(shard.key), str(shard.native_name)
    native = compat.native_variable(variable)
    if native is None:
        return f"deferred:{variable.path}", f"{variable.path}:0"
    return compat.variable_key(native), str(native.name)


