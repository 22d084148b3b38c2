"""One optimizer step on shards: reduce, agree, clip, update, gather.

    gradients -> pack a bucket -> reducescatter -> update own pieces -> allgather -> variables

Everything depends on the gradients, by data or by control dependencies: a step that dies for lack
of data (as Keras' last one on a dataset of unknown size does) has then changed and sent nothing.
A branch that holds a collective is only ever taken on a value that all ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from zerohvd.config import ZeroConfig
from zerohvd.keras import compat
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.communication.wire import Wire
from zerohvd.keras.gradients import loss_scale
from zerohvd.keras.gradients.reducer import GradReducer, Reduction, first_of
from zerohvd.keras.optimizer import averages, clipping
from zerohvd.keras.optimizer.update import PieceUpdate
from zerohvd.keras.params.pieces import PieceVariable, shard_of, tf_variable
from zerohvd.keras.params.shards import ShardedVariables
from zerohvd.layout import Bucket, Layout


class ShardedStep(ShardedVariables):
    """The variables of one optimizer and the step that updates them, called eagerly or traced.

    `inner` is the wrapped optimizer, built on `pieces`.
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
        super().__init__(layout, wire, variables, pieces)
        self.inner, self.config = inner, config
        steps = inner.gradient_accumulation_steps or 1
        sums = compat.accumulated_gradients(inner) if steps > 1 and config.stage > 1 else None
        self.reducer = GradReducer(self, config.reduce_dtype, steps, sums)
        self.gain = 1.0  # what mean gradients are multiplied with, where sums are asked for
        self.eager = False  # whether the last step was called eagerly, or traced, as in `fit`
        # The collective that a step begins with, if that is none of the optimizer's own.
        self.begins_with: str | None = None
        self._heads: list[Any] = []
        self._one_call = compat.updates_together(inner)

    # -- the story --------------------------------------------------------------------------------

    def run(
        self, grads: Sequence[Any], scaler: Any = None, weight: Any = None, in_loss: bool = False
    ) -> None:
        """Apply gradients.

        Args:
            grads: One per variable; None where there is none.
            scaler: The LossScaleOptimizer that scaled their loss; None: nobody did.
            weight: How much this rank counts; None: as much as any other.
            in_loss: Whether the gradients have been multiplied with the weight already.
        """
        traffic = self.wire.new_traffic()
        self.eager, self.reducer.weighted = tf.executing_eagerly(), weight is not None
        scale = self.inner.loss_scale_factor
        if scaler is not None:
            scale = tf.convert_to_tensor(scaler.dynamic_scale.value)
        if self.gain != 1.0:
            scale = (1.0 if scale is None else scale) / self.gain
        reduction = Reduction(self.reducer, grads, scale, weight, in_loss)
        self._heads = reduction.heads
        clock = self.wire.clock
        if clock is not None:
            clock.begin(list(grads))
        with after(self._heads):
            self.wire.step.assign_add(1)
        if self._pipelined(scaler):
            self._finish(self._reduce_and_update(reduction), reduction)
            return
        local = bool(self.reducer.local_sums) and self._steps > 1
        reduced = reduction.locally() if local else reduction.all(reduction.grads)
        if clock is not None and not local:
            clock.add_squares(reduced)
        if scaler is None:
            self._accumulate_or_update(reduced, reduction)
            return

        def finite_step() -> Any:
            with traffic.branch("finite"):
                self._accumulate_or_update(reduced, reduction)
            loss_scale.grow(scaler)
            return tf.constant(True)

        def skipped_step() -> Any:
            loss_scale.back_off(scaler)
            self.forget_errors()  # what has travelled of them is not applied
            return tf.constant(False)

        tf.cond(loss_scale.all_finite(reduced, self.wire), finite_step, skipped_step)

    def forget_errors(self) -> None:
        """Drop what has not travelled of the gradients of earlier steps."""
        if self.wire.packing is not None:
            self.wire.packing.forget()

    @property
    def _steps(self) -> int:
        """How many steps are accumulated for an update; may be set during training, as in Keras."""
        steps = self.inner.gradient_accumulation_steps or 1
        if steps > 1 and not self.reducer.accumulates:
            raise ValueError(
                f"gradient_accumulation_steps={steps} was set after the optimizer was built, which "
                "has made no memory for sums: give it to the optimizer when you create it"
            )
        return int(steps)

    def _pipelined(self, scaler: Any) -> bool:
        """Whether a bucket may be updated before the next one has been reduced."""
        needs_all = clipping.needs_norms(self.inner, self.config) or self._one_call
        return scaler is None and self._steps == 1 and not needs_all

    def _as_gradients_come(self) -> Sequence[Bucket]:
        """At stage 3, backward's order: what is updated while the rest of backward still runs has
        freed its gradient by then. A bucket is complete with its first variable."""
        buckets = self.layout.buckets
        if self.config.stage < 3:
            return buckets
        return sorted(buckets, key=lambda bucket: -min(slot.param for slot in bucket.slots))

    def _new_update(self) -> PieceUpdate:
        # Who knows what an optimizer does that is not known to update each element by itself. And
        # where nothing is recomputed, the bits are those of stage 2: TensorFlow rewrites arithmetic
        # that it sees in one graph.
        homes = [shard_of(v).home for v in self.variables if shard_of(v) is not None]
        alike = self.layout.partition == "flat" and any(home.recomputes for home in homes)
        return PieceUpdate(self.inner, alike)

    def _reduce_and_update(self, reduction: Reduction) -> list[Any]:
        """Reduce, update and gather bucket by bucket; returns operations to wait for."""
        done: list[Any] = []
        updated: list[Any] = []
        reduced: list[Any] = []
        assembly, update, window = self.assembly(), self._new_update(), self.reducer.window
        rate = self.inner.learning_rate
        for bucket in self._as_gradients_come():
            if self.is_kept(bucket):
                done.append(self._update_kept(bucket, reduction, update, rate))
                updated.append(done[-1])
                continue
            with window.after(updated), after(reduced):
                reduced = reduction.bucket(bucket, reduction.grads)
            if self.wire.clock is not None:
                self.wire.clock.add_squares(reduced)
            reduced = clipping.by_value(reduced, self.inner)
            pieces = self.pieces_in(bucket)
            with window.after(done), after(first_of(reduced)):
                update.run(pieces, reduced, rate, reduction.given)
            updated.append([piece.read_value() for piece in pieces])
            done.append(self._gather_after(done, bucket, assembly))
        return done

    def _update_kept(
        self, bucket: Bucket, reduction: Reduction, update: PieceUpdate, rate: Any
    ) -> list[Any]:
        """Update what a unit has reduced, and what stays with this rank (stage 3). A table is
        updated part by part: neither its gradient nor the new values are ever whole."""
        done: list[Any] = []
        reduction.add_up()

        def mean(total: Any, piece: PieceVariable) -> Any:
            return clipping.by_value([reduction.mean(total, piece)], self.inner)[0]

        pieces = self.pieces_in(bucket)
        is_table = self.is_table(bucket)
        for group in [[p] for p in pieces] if is_table else [pieces]:
            with after(done[-1:]):
                grads = [reduction.piece(piece) for piece in group]
                self._watch_squares(reduction, grads, group, is_table)
                update.run(group, grads, rate, reduction.given, mean)
                done += self.keep(group)
        return done

    def _watch_squares(
        self, reduction: Reduction, grads: Sequence[Any], pieces: Any, is_table: bool
    ) -> None:
        clock = self.wire.clock
        if clock is not None and is_table:
            clock.has_squares = False
        elif clock is not None:
            given = [(g, p) for g, p in zip(grads, pieces, strict=True) if g is not None]
            clock.add_squares([reduction.mean(g, p) for g, p in given])

    def _accumulate_or_update(self, grads: Sequence[Any], reduction: Reduction) -> None:
        """Given gradients known to be finite, or not scaled."""
        reducer = self.reducer
        steps, local = self._steps, bool(reducer.local_sums)
        if steps == 1:
            self._finish(self._update(self._clip(grads), reduction), reduction)
            return
        due = tf.equal((compat.iterations(self.inner).value + 1) % steps, 0)

        def counts() -> Any:
            found = reduction.counts
            return tf.zeros([len(self.variables)]) if found is None else tf.identity(found)

        def update() -> Any:
            with self.wire.traffic.branch("update"):
                means = reducer.means_with(grads, steps)
                if local:
                    means = reduction.all(means)
                done = self._update(self._clip(means), reduction)
            with after(done):
                reducer.clear()
            return counts()

        def accumulate() -> Any:
            reducer.accumulate(grads)
            return counts() if known else tf.zeros([len(self.variables)])

        known = reduction.counts is not None
        seen = tf.cond(due, update, accumulate)
        reduction.take_counts(seen)
        self._finish([seen], reduction)

    def _clip(self, grads: Sequence[Any]) -> list[Any]:
        if not clipping.needs_norms(self.inner, self.config):
            return clipping.by_value(grads, self.inner)
        wire = self.wire if self.layout.size > 1 else None
        params = [p.piece.param for p in self.pieces]
        return clipping.by_norm(grads, params, len(self.variables), self.inner, self.config, wire)

    def _update(self, grads: Sequence[Any], reduction: Reduction) -> list[Any]:
        """Update all pieces and gather every bucket; returns operations to wait for."""
        update = self._new_update()
        with after(first_of(grads)):
            rate = self.inner.learning_rate
            if self._one_call:
                update.run(self.pieces, grads, rate, reduction.given)
        assembly = self.assembly()
        done: list[Any] = []
        for bucket in self.layout.buckets:
            if not self._one_call:
                with self.reducer.window.after(done):
                    mine = [grads[i] for i in self.indices_in(bucket)]
                    update.run(self.pieces_in(bucket), mine, rate, reduction.given)
            done.append(self._gather_after(done, bucket, assembly))
        return done

    def _gather_after(self, done: Sequence[Any], bucket: Bucket, assembly: Any) -> Any:
        # Two gathers in flight would make Horovod fuse them, in a buffer of 128 MiB by default.
        with after(done[-1:]):
            return self.gather(bucket, assembly, self._data())

    def _finish(self, done: Sequence[Any], reduction: Reduction) -> None:
        """What Keras does after the update, in Keras' order."""
        with after(done):
            if self.inner.use_ema:
                done = averages.update(self.inner, self)
        with after(done):
            for index, variable in enumerate(self.variables):
                if getattr(variable, "constraint", None) is not None:
                    _constrain(variable, reduction.given(index))
            compat.iterations(self.inner).assign_add(1)

    def _data(self) -> list[Any]:
        """What to wait for in a step of which this rank has nothing else; inside a branch, which
        only a step with data enters, nothing."""
        if tf.executing_eagerly():
            return []
        graph = tf.compat.v1.get_default_graph()
        return [t for t in self._heads if getattr(t, "graph", None) is graph]

    @property
    def local_sums(self) -> list[tf.Variable]:
        """Gradients that stages 0 and 1 accumulate on each rank, one per variable."""
        return self.reducer.local_sums


def _constrain(variable: Any, given: Any) -> None:
    """Apply the variable's constraint if it has been `given`: a bool or a tensor."""
    shard = shard_of(variable)
    if shard is not None:
        if given is not False:
            constraint = variable.constraint
            here = tf.convert_to_tensor(given)
            shard.home.rewrite(variable, lambda v: tf.cond(here, lambda: constraint(v), lambda: v))
        return
    native = tf_variable(variable)
    if given is True:
        native.assign(variable.constraint(tf.convert_to_tensor(native)))
    elif given is not False:
        value = tf.convert_to_tensor(native)
        native.assign(tf.cond(given, lambda: variable.constraint(value), lambda: value))
