"""One optimizer step on shards: reduce, agree, clip, update, gather.

    gradients -> pack a bucket -> reducescatter -> update own pieces -> allgather -> variables

Everything hangs on the gradients, by data or by control dependencies: a step that dies for lack
of data (as Keras' last one on a dataset of unknown size does) has then changed and sent nothing.
A branch that holds a collective is only ever taken on a value that all ranks share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from zerohvd.config import ZeroConfig
from zerohvd.keras.communication.wire import Wire
from zerohvd.keras.gradients import ops, sparse
from zerohvd.keras.gradients.reducer import Reduction
from zerohvd.keras.optimizer import averages, clipping, loss_scale
from zerohvd.keras.params import buffers
from zerohvd.keras.params.pieces import PieceVariable, tf_variable
from zerohvd.layout import Bucket, Layout

# TensorFlow runs whatever can run, and would hold a copy of all gradients on their way. So many
# buckets are under way at a time, once so many bytes of gradients (in buckets) have been freed that
# there is room for them; before that, one after the other.
IN_FLIGHT = 2
ROOM = 3


class Step:
    """The step of one optimizer, for eager calls and for tracing alike.

    Args:
        inner: The wrapped optimizer, built on `pieces`.
        config: Settings.
        layout: Of the variables; for one rank (every piece a whole variable) at stage 0.
        wire: The ranks.
        variables: The model's, in the layout's order.
        pieces: What this rank updates.
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer,
        config: ZeroConfig,
        layout: Layout,
        wire: Wire,
        variables: Sequence[Any],
        pieces: Sequence[PieceVariable],
    ) -> None:
        self.inner, self.config, self.layout, self.wire = inner, config, layout, wire
        self.variables, self.pieces = tuple(variables), tuple(pieces)
        self.natives = tuple(tf_variable(v) for v in variables)
        self.rank = wire.rank if layout.size > 1 else 0
        self._pieces_of = [[] for _ in layout.buckets]
        for index, piece in enumerate(pieces):
            self._pieces_of[piece.piece.bucket].append(index)
        self.steps = inner.gradient_accumulation_steps or 1
        # Below stage 2 whole gradients are added up locally and reduced once per update.
        self.local_sums: list[tf.Variable] = []
        if self.steps > 1 and config.stage < 2:
            with tf.init_scope():
                self.local_sums = [
                    tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False, name="gradient_sum")
                    for v in variables
                ]
        self._heads: list[Any] = []
        self._early = _early(layout)
        self._turn = _Turn()
        # Whether ranks say how much they count, in the step that was called or traced last.
        self.weighted = False
        # Which parameters get gradients; fixed by the first step, when all ranks compare theirs.
        self.present: frozenset[int] | None = None
        # Which of them are frozen now and were not given to this step: left alone, as in Keras.
        self.frozen: frozenset[int] = frozenset()
        # Nadam and the like change shared state once per step: all pieces in one call.
        base = keras.optimizers.SGD._backend_update_step
        self._one_call = type(inner)._backend_update_step is not base

    # -- the story --------------------------------------------------------------------------------

    def run(
        self, grads: Sequence[Any], scaler: Any = None, weight: Any = None, in_loss: bool = False
    ) -> None:
        """Apply gradients.

        Args:
            grads: They belong to `variables`; None where there is none.
            scaler: A LossScaleOptimizer that scaled their loss.
            weight: How much this rank counts; None: as much as any other.
            in_loss: Whether the gradients have been multiplied with the weight already.
        """
        plan = self.wire.new_plan()
        self.weighted = weight is not None
        grads = [sparse.rows_of(g, v.shape) for g, v in zip(grads, self.variables, strict=True)]
        with tf.control_dependencies(ops.first_of(grads)):
            self.wire.step.assign_add(1)
        self._heads = ops.first_of(grads)
        scale = self._loss_scale(scaler)
        reduction = Reduction(self, self._heads, scale, weight, in_loss)
        if self._pipelined(scaler):
            self._finish(self._reduce_and_update(grads, reduction))
            return
        if self.local_sums:
            payload = reduction.locally(grads)
        else:
            payload = self._reduce_all(grads, reduction)
        if scaler is None:
            self._body(payload, reduction)
            return

        def finite_step() -> Any:
            with plan.section("finite"):
                self._body(payload, reduction)
            loss_scale.grow(scaler)
            return tf.constant(True)

        def skipped_step() -> Any:
            loss_scale.back_off(scaler)
            return tf.constant(False)

        tf.cond(self._all_finite(payload), finite_step, skipped_step)

    def _body(self, payload: Sequence[Any], reduction: Reduction) -> None:
        """Add up or update, given gradients known to be good."""
        if self.steps == 1:
            self._finish(self._update(self._clip(payload)))
            return
        due = tf.equal((self.inner._iterations.value + 1) % self.steps, 0)

        def update() -> Any:
            with self.wire.plan.section("update"):
                sums = self._sums()
                grads = [
                    ops.added(g, s, self.steps) for g, s in zip(payload, sums, strict=True)
                ]
                if self.local_sums:
                    grads = self._reduce_all(grads, reduction)
                done = self._update(self._clip(grads))
            with tf.control_dependencies(done):
                for s in sums:
                    s.assign(tf.zeros_like(s))
            return tf.constant(True)

        def collect() -> Any:
            for g, s in zip(payload, self._sums(), strict=True):
                if g is not None:
                    s.assign(s + tf.cast(g, s.dtype))
            return tf.constant(False)

        updated = tf.cond(due, update, collect)
        self._finish([updated])

    def _finish(self, done: Sequence[Any]) -> None:
        """What Keras does after the update, in Keras' order."""
        with tf.control_dependencies(ops.to_wait_for(done)):
            if self.inner.use_ema:
                done = averages.update(self)
        with tf.control_dependencies(ops.to_wait_for(done)):
            for index, variable in enumerate(self.variables):
                constraint = getattr(variable, "constraint", None)
                if constraint is not None and self.updates(index):
                    native = tf_variable(variable)
                    native.assign(constraint(tf.convert_to_tensor(native)))
            self.inner._iterations.assign_add(1)

    # -- reduce -----------------------------------------------------------------------------------

    def _pipelined(self, scaler: Any) -> bool:
        """Whether a bucket may be updated before the next one has been reduced."""
        needs_all = clipping.needs_norms(self.inner, self.config) or self._one_call
        return scaler is None and self.steps == 1 and not needs_all

    def _reduce_and_update(self, grads: Sequence[Any], reduction: Reduction) -> list[Any]:
        done: list[Any] = []
        updated: list[Any] = []
        reduced: list[Any] = []
        assembled = buffers.Assembly(self.layout, self.natives)
        rate = self._learning_rate()
        self._turn = _Turn()
        for bucket in self.layout.buckets:
            with self._few(updated), tf.control_dependencies(ops.to_wait_for(reduced)):
                reduced = reduction.bucket(bucket, grads)
            reduced = clipping.by_value(reduced, self.inner)
            indices = self.indices_in(bucket)
            with self._few(done), tf.control_dependencies(ops.first_of(reduced)):
                self._update_pieces(indices, reduced, rate)
            updated.append([self.pieces[i].read_value() for i in indices])
            # Two at a time would make Horovod fuse them, in a buffer of 128 MiB by default.
            with tf.control_dependencies(ops.to_wait_for(done[-1:])):
                done.append(self.gather(bucket, assembled))
        return done

    def _few(self, started: Sequence[Any]) -> Any:
        """What is made inside waits until few enough of those that were `started` before it, one
        per bucket, are under way."""
        ahead = 1 if len(started) < self._early else IN_FLIGHT
        last = started[len(started) - ahead :][:1] if len(started) >= ahead else []
        return tf.control_dependencies(ops.to_wait_for(last))

    def _reduce_all(self, grads: Sequence[Any], reduction: Reduction) -> list[Any]:
        """A gradient per piece."""
        reduced: list[Any] = [None] * len(self.pieces)
        before: list[Any] = []
        for bucket in self.layout.buckets:
            with self._few(before):
                found = reduction.bucket(bucket, grads)
            before.append(found)
            for index, grad in zip(self.indices_in(bucket), found, strict=True):
                reduced[index] = grad
        return reduced

    # -- agree ------------------------------------------------------------------------------------

    def _loss_scale(self, scaler: Any) -> Any:
        if scaler is not None:
            return tf.convert_to_tensor(scaler.dynamic_scale.value)
        return self.inner.loss_scale_factor

    def _all_finite(self, grads: Sequence[Any]) -> Any:
        """The same answer on every rank: no rank has seen an infinity or a NaN."""
        flags = [tf.reduce_all(tf.math.is_finite(g)) for g in grads if g is not None]
        mine = tf.cast(tf.reduce_all(tf.stack(flags)), tf.float32) if flags else tf.ones([])
        name = f"{self.wire.prefix}/finite"
        return self.wire.allreduce(tf.reshape(mine, [1]), name, op="min")[0] > 0

    def _clip(self, grads: Sequence[Any]) -> list[Any]:
        if clipping.needs_norms(self.inner, self.config):
            wire = self.wire if self.layout.size > 1 else None
            return clipping.by_norm(
                grads, [p.piece.param for p in self.pieces], len(self.variables),
                self.inner, self.config, wire,
            )  # fmt: skip
        return clipping.by_value(grads, self.inner)

    def _sums(self) -> Sequence[Any]:
        if self.local_sums:
            return self.local_sums
        return [v.value for v in self.inner._accumulated_gradients]

    # -- update and gather ------------------------------------------------------------------------

    def _learning_rate(self) -> Any:
        return self.inner.learning_rate

    def _update(self, grads: Sequence[Any]) -> list[Any]:
        """Update all pieces and gather every bucket."""
        self._turn = _Turn()
        with tf.control_dependencies(ops.first_of(grads)):
            rate = self._learning_rate()
            if self._one_call:
                self._update_pieces(range(len(self.pieces)), grads, rate)
        assembled = buffers.Assembly(self.layout, self.natives)
        done: list[Any] = []
        for bucket in self.layout.buckets:
            indices = self.indices_in(bucket)
            with self._few(done):
                if not self._one_call:
                    self._update_pieces(indices, [grads[i] for i in indices], rate)
            with tf.control_dependencies(ops.to_wait_for(done[-1:])):
                done.append(self.gather(bucket, assembled))
        return done

    def _update_pieces(self, indices: Sequence[int], grads: Sequence[Any], rate: Any) -> None:
        """Let the inner optimizer change the pieces; their values are tensors afterwards."""
        pieces = [self.pieces[i] for i in indices]
        # Keras leaves a variable without gradient alone, weight decay included.
        chosen = [(g, p) for g, p in zip(grads, pieces, strict=True) if g is not None]
        for grad, piece in zip(grads, pieces, strict=True):
            if grad is None:
                piece.load()
        if not chosen and not self._one_call:
            return
        chosen_grads, chosen_pieces = [g for g, _ in chosen], [p for _, p in chosen]
        with self._turn.taken_by(self.inner):
            self.inner._backend_update_step(chosen_grads, chosen_pieces, rate)
        for piece in chosen_pieces:
            piece.set(piece.read_value())

    # -- for those who take part in it ------------------------------------------------------------

    def indices_in(self, bucket: Bucket) -> Sequence[int]:
        """Which of this rank's pieces lie in the bucket."""
        return self._pieces_of[bucket.index]

    def pieces_in(self, bucket: Bucket) -> list[PieceVariable]:
        return [self.pieces[i] for i in self.indices_in(bucket)]

    def updates(self, param: int) -> bool:
        """Whether the step changes the parameter."""
        return param in self.present and param not in self.frozen

    def gather(self, bucket: Bucket, assembled: buffers.Assembly) -> Any:
        """Send this rank's new values, and store everybody's in the model's variables."""
        pieces = self.pieces_in(bucket)
        values = [p.read_value() for p in pieces]
        for piece in pieces:
            piece.drop()
        if self.layout.size == 1:
            native = [tf_variable(p.variable) for p in pieces]
            return [
                v.assign(tf.reshape(tf.cast(x, v.dtype), v.shape), read_value=False)
                for v, x in zip(native, values, strict=True)
            ]
        shard = buffers.pack_shard(bucket, self.rank, values, [p.piece.bucket_span for p in pieces])
        if not pieces:
            with tf.control_dependencies(self._data()):
                shard = self.wire.live(shard)
        lengths = [span.length for span in bucket.spans()]
        full = self.wire.allgather(shard, lengths, self.name_of(bucket, "allgather"))
        return assembled.add(bucket, full)

    def _data(self) -> list[Any]:
        """What to depend on in a step of which this rank has nothing else; in a branch, which only
        a step with data enters, there is no need."""
        if tf.executing_eagerly():
            return []
        graph = tf.compat.v1.get_default_graph()
        return [t for t in self._heads if getattr(t, "graph", None) is graph]

    @property
    def weight_name(self) -> str:
        """Of the operation that adds up how much the ranks count."""
        return f"{self.wire.prefix}/weight"

    def name_of(self, bucket: Bucket, op: str) -> str:
        first = self.layout.params[bucket.slots[0].param].name
        return f"{self.wire.prefix}/b{bucket.index}/{op}/{_op_name(first)}"


def _early(layout: Layout) -> int:
    """How many buckets go one after the other, until there is room for more at a time."""
    sizes = [b.padded * tf.as_dtype(b.dtype).size for b in layout.buckets]
    freed = 0
    for index, size in enumerate(sizes):
        if freed >= ROOM * max(sizes):
            return index
        freed += size
    return len(sizes)


class _Turn:
    """Lets the inner optimizer update one piece after the other.

    An update takes several times the memory of what it updates, and TensorFlow would run all of
    them side by side.
    """

    def __init__(self) -> None:
        self._before: list[Any] = []

    @contextlib.contextmanager
    def taken_by(self, inner: Any) -> Iterator[None]:
        update = inner.update_step

        def update_step(grad: Any, piece: PieceVariable, rate: Any) -> None:
            with tf.control_dependencies(ops.to_wait_for(self._before)):
                piece.load()
                inner._apply_weight_decay([piece])
                update(grad, piece, rate)
            self._before = [piece.read_value()]

        inner.update_step = update_step
        try:
            yield
        finally:
            del inner.update_step


def _op_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "." for c in name)
