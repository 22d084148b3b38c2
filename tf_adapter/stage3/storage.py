"""The memory of a unit: this rank's parts of its variables, bucket by bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.communication import arrays
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.communication.wire import Wire
from zerohvd.keras.params import buffers
from zerohvd.keras.params.pieces import shard_of, write_rows
from zerohvd.keras.stage3.initial.drawing import BLOCK, Recipe
from zerohvd.keras.stage3.placeholder import Home, Shard, hide
from zerohvd.layout import Bucket, Layout, Span

# Of a table, the part that the temporaries of its updates take.
_FOR_UPDATES = 4
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
        # Elements of a row, of a table that is sharded by rows: pieces are 2-D then.
        self.width = 0
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

    def fill(self, home: Home, recipes: Sequence[Recipe | None], *, broadcast: bool) -> None:
        """Take this rank's parts of the variables' values and free the rest. All ranks call it.

        Variables with a recipe are drawn. With `broadcast`, the others get the first rank's values.
        """
        keys = [_key(v) for v in self.variables]
        spans = [self.spans_of(place)[self._rank] for place in range(len(self.variables))]
        with tf.init_scope():
            parts = self._first_parts(recipes, spans, broadcast)
            for place, (variable, span) in enumerate(zip(self.variables, spans, strict=True)):
                if place in parts:
                    shape = [-1, self.width] if self.width else [-1]
                    piece = tf.Variable(tf.reshape(parts.pop(place), shape), name=variable.name)
                else:
                    piece = _drawn(recipes[place], span, self.width, variable.name)
                self._pieces.append(piece)
                name = self._names[place]
                hide(variable, Shard(name, span, piece, home, *keys[place], self.width))

    def _first_parts(
        self, recipes: Sequence[Recipe | None], spans: Sequence[Span], broadcast: bool
    ) -> dict[int, Any]:
        """This rank's parts, 1-D, of the variables that are not drawn, by their place."""
        known = self._sharded_values()
        if known is not None:
            return {i: _part(value, spans[i]) for i, value in enumerate(known)}
        places = [i for i, recipe in enumerate(recipes) if recipe is None]
        if not broadcast or self._wire.size == 1:
            return {i: _part(compat.first_value(self.variables[i]), spans[i]) for i in places}
        return self._broadcast(places, spans)

    def _broadcast(self, places: Sequence[int], spans: Sequence[Span]) -> dict[int, Any]:
        """This rank's parts of the first rank's values. Only the first rank ever holds them whole:
        they are sent in blocks."""
        values, first = [], self._wire.rank == 0
        if first:
            values = [tf.reshape(compat.first_value(self.variables[i]), [-1]) for i in places]
        packed = values[0] if len(values) == 1 else tf.concat(values, 0) if values else None
        values.clear()
        starts = [0, *itertools.accumulate(self.bucket.slots[i].length for i in places)]
        found: dict[int, list[Any]] = {i: [tf.zeros([0], self.bucket.dtype)] for i in places}
        for start in range(0, starts[-1], _BROADCAST):
            block = Span(start, min(start + _BROADCAST, starts[-1]))
            sent = tf.zeros([block.length], self.bucket.dtype)
            if packed is not None:
                sent = tf.identity(packed[block.start : block.stop])
            name = f"{self._wire.prefix}/u/init/{start}/{self.name}"
            got = self._wire.eager.broadcast(sent, 0, name=name)
            for place, offset in zip(places, starts, strict=False):
                own = block.intersect(spans[place].shift(offset)).shift(-block.start)
                if own.length:
                    found[place].append(got[own.start : own.stop])
        # A copy: a slice would keep the block alive.
        return {place: tf.concat(parts, 0) for place, parts in found.items()}

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
            piece.assign(tf.reshape(packed[held.start : held.stop], piece.shape), read_value=False)
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
        """This rank's parts, 1-D, as tensors that gradients can be taken of."""
        flat = tf.reshape if self.width else lambda piece, _: tf.convert_to_tensor(piece)
        return [flat(piece, [-1]) for piece in self._pieces]

    @property
    def stored(self) -> list[tf.Variable]:
        """What stores this rank's parts."""
        return list(self._pieces)

    def gather(self, pieces: Sequence[Any], name: str, wait_for: Sequence[Any]) -> list[Any]:
        """The whole variables, from all ranks' pieces; it starts after `wait_for`."""
        return self.split(self.gather_flat(pieces, name, wait_for))

    def gather_flat(
        self, pieces: Sequence[Any], name: str, wait_for: Sequence[Any], *, packed: bool = False
    ) -> Any:
        """The whole bucket, 1-D, from all ranks' pieces; it starts after `wait_for`.

        Args:
            packed: For a pass: rounded, if that is the policy.
        """
        held = [(p, span) for p, span in zip(pieces, self._held, strict=True) if span.length]
        with after(wait_for):
            if len(held) == 1:  # several are joined by an operation that waits
                held = [(tf.identity(held[0][0]), held[0][1])]
            values, spans = [p for p, _ in held], [s for _, s in held]
            shard = buffers.pack_shard(self.bucket, self._rank, values, spans)
            if not held:
                shard = self._wire.live(shard)
        lengths, codec = self.bucket.lengths, self._wire.codec
        if packed and codec is not None:
            full = self._wire.allgather_packed(shard, lengths, codec, self.op_name(name))
            return tf.cast(full, self.bucket.dtype)
        return self._wire.allgather(shard, lengths, self.op_name(name))

    def split(self, full: Any) -> list[Any]:
        """The whole variables in a whole bucket."""
        return [
            arrays.reshape(buffers.cut(full, slot.span), variable.shape)
            for slot, variable in zip(self.bucket.slots, self.variables, strict=True)
        ]

    def flatten_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """The variables' gradients, 1-D."""
        # TensorFlow may not know the shape of a gradient, as of an einsum on an unknown batch.
        return [
            None if grad is None else arrays.reshape(tf.convert_to_tensor(grad), [slot.length])
            for slot, grad in zip(self.bucket.slots, grads, strict=True)
        ]

    def pack_gradients(self, grads: Sequence[Any]) -> Any:
        """The variables' gradients as one 1-D tensor; None: zeros."""
        found = zip(self.bucket.slots, self.flatten_gradients(grads), strict=True)
        flats = {slot.param: grad for slot, grad in found if grad is not None}
        packed = buffers.pack(self.bucket, flats, self._dtype)
        return packed if flats else self._wire.live(packed)

    def reduce(
        self, packed: Any, name: str, weigh: Callable[[Any], Any], wait_for: Sequence[Any]
    ) -> list[Any]:
        """This rank's parts of the sum over the ranks of packed gradients."""
        packed = weigh(packed)
        with after(wait_for):
            packed = tf.identity(packed)
        reduced = self._wire.reducescatter(packed, self.bucket.lengths, self.op_name(name))
        # A rank that owns nothing here would prune it, and the others wait.
        self._wire.keep(reduced)
        return [buffers.cut(reduced, held.shift(-self._start)) for held in self._held]

    def op_name(self, name: str) -> str:
        """The name of a collective on the bucket, with that of its first variable."""
        return name + "/" + "".join(c if c.isalnum() or c in "._-" else "." for c in self.name)


def _part(value: Any, span: Span) -> Any:
    """A range of a value, 1-D: a copy, as a slice would keep all of it alive."""
    flat = tf.reshape(value, [-1])
    return flat if span == (0, flat.shape[0]) else tf.concat([flat[span.start : span.stop]], 0) + 0


def _drawn(recipe: Recipe | None, span: Span, width: int, name: str) -> tf.Variable:
    """A variable that holds a range of what the recipe draws; `width`: as rows of a table."""
    assert recipe is not None
    block = BLOCK // width * width if 0 < width <= BLOCK else width or BLOCK
    stops = [*range(span.start + block, span.stop, block), span.stop]
    blocks = [Span(a, b) for a, b in zip([span.start, *stops], stops, strict=False)]
    if not width:
        return tf.Variable(tf.concat([recipe.draw(b) for b in blocks], 0), name=name)
    # With oneDNN, TensorFlow takes memory in regions, each twice as large as the one before, and
    # gives none back. Updates of a table are made in parts: what they take gets its region now, as
    # behind the table and the optimizer's state it would be one as large as both.
    tf.raw_ops.Empty(shape=[span.length // _FOR_UPDATES], dtype=recipe.dtype)
    piece = tf.Variable(tf.zeros([span.length // width, width], recipe.dtype), name=name)
    for b in blocks if span.length else ():
        rows = tf.range((b.start - span.start) // width, (b.stop - span.start) // width)
        write_rows(piece, rows, recipe.draw(b))
    return piece


def _key(variable: Any) -> tuple[str, str]:
    """What Keras' optimizers know a variable by: its key, and its name in TensorFlow."""
    shard = shard_of(variable)
    if shard is not None:
        return str(shard.key), str(shard.native_name)
    native = compat.native_variable(variable)
    if native is None:
        return f"deferred:{variable.path}", f"{variable.path}:0"
    return compat.variable_key(native), str(native.name)


