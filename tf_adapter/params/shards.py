"""Variables whose updates are sharded: who owns what, and the gather after an update."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.keras.communication import arrays
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.communication.wire import Wire
from zerohvd.keras.params import buffers
from zerohvd.keras.params.pieces import (
    PieceVariable,
    dtype_of,
    shard_of,
    tf_variable,
    variable_path,
    write_rows,
)
from zerohvd.layout import Bucket, Layout, ParamSpec
from zerohvd.training.naming import unique_names

# Names of variables whose gradients are tf.IndexedSlices; `build` sees variables, not gradients.
_TABLE = re.compile("embed|table")


class ShardedVariables:
    """The variables of one optimizer, in the layout's order, and the pieces that this rank owns.

    At stage 0 the layout is that of one rank, and every piece a whole variable.
    """

    def __init__(
        self,
        layout: Layout,
        wire: Wire,
        variables: Sequence[Any],
        pieces: Sequence[PieceVariable],
    ) -> None:
        self.layout, self.wire = layout, wire
        self.variables, self.pieces = tuple(variables), tuple(pieces)
        self.natives = tuple(tf_variable(v) for v in variables)
        self.rank = wire.rank if layout.size > 1 else 0
        self._index_of = {v.ref(): i for i, v in enumerate(self.natives)}
        self._pieces_of: list[list[int]] = [[] for _ in layout.buckets]
        for index, piece in enumerate(pieces):
            self._pieces_of[piece.piece.bucket].append(index)

    def index_of(self, variable: Any) -> int:
        """Which of `variables` it is."""
        index = self._index_of.get(tf_variable(variable).ref())
        if index is None:
            raise ValueError(
                f"unknown variable {variable}: the optimizer was built with other variables. Give "
                "new variables to a new optimizer."
            )
        return index

    def indices_in(self, bucket: Bucket) -> Sequence[int]:
        """Which of this rank's pieces lie in the bucket."""
        return self._pieces_of[bucket.index]

    def pieces_in(self, bucket: Bucket) -> list[PieceVariable]:
        return [self.pieces[i] for i in self.indices_in(bucket)]

    def is_kept(self, bucket: Bucket) -> bool:
        """Whether the variables in the bucket are sharded: gradients come reduced, and what has
        been updated stays with its rank (stage 3)."""
        return shard_of(self.variables[bucket.slots[0].param]) is not None

    def is_table(self, bucket: Bucket) -> bool:
        """Whether the bucket is a table that is sharded by rows (stage 3)."""
        return self.is_kept(bucket) and shard_of(self.variables[bucket.slots[0].param]).width > 0

    def keep(self, pieces: Sequence[PieceVariable]) -> list[Any]:
        """Store the values of these pieces of sharded variables; returns operations to wait for."""
        parts: dict[int, list[Any]] = {}
        done = []
        for piece in pieces:
            value, stored = piece.read_value(), piece.is_stored
            piece.drop()
            if stored:
                done.append(value)
                continue
            if shard_of(piece.variable).width:
                done.append(write_rows(self.natives[piece.piece.param], piece.rows, value))
                continue
            parts.setdefault(piece.piece.param, []).append(arrays.flatten(value))
        for param, flats in parts.items():
            native = self.natives[param]
            flat = flats[0] if len(flats) == 1 else tf.concat(flats, 0)
            done.append(native.assign(tf.cast(flat, native.dtype), read_value=False))
        return done

    def name_of(self, bucket: Bucket, op: str) -> str:
        """The name of a collective on the bucket."""
        first = self.layout.params[bucket.slots[0].param].name
        plain = "".join(c if c.isalnum() or c in "._-" else "." for c in first)
        return f"{self.wire.prefix}/b{bucket.index}/{op}/{plain}"

    def assign_all(self, prepare: Callable[[Bucket], None]) -> list[Any]:
        """Gather every bucket, after `prepare(bucket)` has set the values of this rank's pieces;
        returns operations to wait for."""
        assembly = self.assembly()
        done: list[Any] = []
        for bucket in self.layout.buckets:
            # One after the other: Horovod would fuse them, in a buffer of 128 MiB by default.
            with after(done[-1:]):
                prepare(bucket)
                done.append(self.gather(bucket, assembly, exactly=True))
        return done

    def settle_rounding(self) -> None:
        """Give all ranks the exact values, where variables travel packed; all ranks call it.

        A checkpoint holds one value per variable: training goes on from that one too.
        """
        if self.wire.codec is not None:  # not by the pieces: a rank may have none
            self.assign_all(self._load)

    def _load(self, bucket: Bucket) -> None:
        for piece in self.pieces_in(bucket):
            piece.load()

    def assembly(self) -> buffers.Assembly:
        """What `gather` puts buckets into; one for all buckets."""
        return buffers.Assembly(self.layout, self.natives)

    def gather(
        self,
        bucket: Bucket,
        assembly: buffers.Assembly,
        wait_for: Any = (),
        *,
        exactly: bool = False,
    ) -> Any:
        """Allgather all ranks' pieces and assign them to the model's variables; returns operations
        to wait for. A rank without a piece, whose allgather has no input, waits for `wait_for`.

        Args:
            exactly: Not packed, whatever the policy is.
        """
        pieces = self.pieces_in(bucket)
        if self.is_kept(bucket):
            return self.keep(pieces)
        values = [p.read_value() for p in pieces]
        for piece in pieces:
            piece.drop()
        if self.layout.size == 1:
            return [
                v.assign(tf.reshape(tf.cast(x, v.dtype), v.shape), read_value=False)
                for v, x in zip([tf_variable(p.variable) for p in pieces], values, strict=True)
            ]
        spans = [p.piece.bucket_span for p in pieces]
        name = self.name_of(bucket, "allgather")
        codec = None if exactly else self.wire.codec
        sent = values
        if codec is not None:
            # By how much they differ from what all ranks have: that packs better.
            sent = [v - tf.cast(p.read(), v.dtype) for p, v in zip(pieces, values, strict=True)]
        shard = buffers.pack_shard(bucket, self.rank, sent, spans)
        if not pieces:
            with after(wait_for):
                shard = self.wire.live(shard)
        if codec is None:
            full = self.wire.allgather(shard, bucket.lengths, name)
        else:
            change = self.wire.allgather_packed(shard, bucket.lengths, codec, name)
            full = self._packed(bucket) + tf.cast(change, bucket.dtype)
        start = bucket.span(self.rank).start
        for piece, value, span in zip(pieces, values, spans, strict=True):
            own = span if codec is not None else span.shift(-start)
            piece.leave_over(value, buffers.cut(full if codec is not None else shard, own))
        return assembly.add(bucket, full)

    def _packed(self, bucket: Bucket) -> Any:
        """The bucket as the model's variables are now."""
        flats = {s.param: arrays.flatten(self.natives[s.param]) for s in bucket.slots}
        return buffers.pack(bucket, flats, tf.as_dtype(bucket.dtype))


def specs_of(variables: Sequence[Any], tables: Collection[int]) -> list[ParamSpec]:
    """Unique names, shapes and dtypes of the variables.

    An embedding table (`tables`: the variables whose gradients are known to be tf.IndexedSlices)
    gets a bucket of its own: only then can its gradient be sent as rows.
    """
    specs = []
    names = unique_names([variable_path(v) for v in variables])
    for index, (variable, name) in enumerate(zip(variables, names, strict=True)):
        path = variable_path(variable)
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"variable {path!r} is overwritten with its gradient (float8 training), which "
                "zerohvd does not support"
            )
        dtype = dtype_of(variable)
        looks_so = len(variable.shape) > 1 and _TABLE.search(path.split("/")[-1].lower())
        group = name if index in tables or looks_so else 0
        specs.append(ParamSpec(name, tuple(variable.shape), dtype, group))
    return specs
