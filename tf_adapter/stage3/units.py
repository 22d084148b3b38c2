"""The units of a Keras model: built of its layers, driven by their calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from zerohvd.errors import ZeroError
from zerohvd.keras import compat
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.communication.recurring import kept_in_graph
from zerohvd.keras.communication.wire import Wire
from zerohvd.keras.params.pieces import shard_of
from zerohvd.keras.stage3.rows import RowTable
from zerohvd.keras.stage3.running import Collecting, Recomputed, gathered_with_gradient
from zerohvd.keras.stage3.storage import UnitBucket
from zerohvd.stage3.planning import UnitPlan


class Unit:
    """A layer whose variables are gathered together, and its memory."""

    def __init__(self, plan: UnitPlan, number: int) -> None:
        self.name, self.number, self.layer = plan.name, number, plan.module
        self.owners = plan.owners
        self.buckets: list[UnitBucket] = []
        self.recompute = False
        self._repeatable = False
        self.table: RowTable | None = None  # of a large embedding, which is never gathered

    def repeatable(self, found: bool | None = None) -> bool:
        """Whether backward is known to compute the same as forward; `found`: it is."""
        if found is not None:
            self._repeatable = found
        return self._repeatable


class Pass:
    """One call of the model, or of a layer by itself.

    Attributes:
        shown: id of a variable -> (variable, its whole value), gathered until the call ends.
        graph: What the call is traced into; None: nothing.
        inputs: Tensors that the call's operations have to wait for.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.shown: dict[int, tuple[Any, Any]] = {}
        self.graph = current_graph()
        self.inputs = list(inputs)
        self.uses: dict[int, int] = {}
        self.in_unit = ""

    def number_use(self, unit: Unit) -> int:
        """How often the unit has been called before in this pass: ranks match names."""
        count = self.uses.get(unit.number, 0)
        self.uses[unit.number] = count + 1
        return count


def current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class FirstOperation(NamedTuple):
    """The collective that every step begins with, as Horovod knows it."""

    kind: str
    name: str


class Units:
    """All units of a model. The first is the root, whose variables stay for a whole pass.

    Attributes:
        weigh: From a packed gradient to this rank's contribution to the sum; the optimizer's.
        connected: ids of the variables that have had a gradient.
        first_operation: What every step begins with; None before the first.
        moved: What one pass forward and backward moves, by the name of the collective.
    """

    def __init__(self, units: Sequence[Unit], wire: Wire) -> None:
        self.all, self.wire = list(units), wire
        self.weigh: Callable[[Any], Any] = lambda packed: packed
        self.connected: set[int] = set()
        self.moved = wire.pass_traffic()
        self.first_operation: FirstOperation | None = None
        self._pass: Pass | None = None
        self._bucket_of: dict[int, tuple[Unit, UnitBucket]] = {}
        self._calls: list[tuple[Any, Any]] = []
        self._asking: int | None = None  # this rank, while it may read and the others help
        self._asked: tuple[int, list[Any]] | None = None  # the last bucket that it asked for

    # -- building ---------------------------------------------------------------------------------

    def add(self, unit: Unit, bucket: UnitBucket) -> None:
        unit.buckets.append(bucket)
        for variable in bucket.variables:
            self._bucket_of[id(variable)] = (unit, bucket)

    def bucket_of(self, variable: Any) -> UnitBucket:
        return self._bucket_of[id(variable)][1]

    @property
    def buckets(self) -> list[UnitBucket]:
        return [bucket for unit in self.all for bucket in unit.buckets]

    @property
    def peak_nbytes(self) -> int:
        """Bytes of variables that are gathered at once: the root's and two units'."""
        gathered = [unit for unit in self.all if unit.table is None]
        root, *others = [sum(b.nbytes for b in unit.buckets) for unit in gathered]
        return 0 if self.is_alone() else root + sum(sorted(others)[-2:])

    @property
    def recomputes(self) -> bool:
        """Whether backward calls any unit again."""
        return any(unit.recompute for unit in self.all)

    def install(self) -> None:
        """Have the layers of units gather when they are called."""
        root, *others = self.all
        inside = {id(layer) for u in others for layer in compat.all_layers(u.layer)}
        for unit in others:
            self._wrap(unit.layer, functools.partial(self._run_unit, unit))
        for layer in {id(x): x for x in (root.layer, *root.owners)}.values():
            if id(layer) not in inside:
                self._wrap(layer, self._run_pass)

    def _wrap(self, layer: Any, run: Callable[..., Any]) -> None:
        original = layer.call

        @tf.autograph.experimental.do_not_convert
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if compat.in_symbolic_scope():
                return original(*args, **kwargs)
            return run(original, args, kwargs)

        # Not by setattr: Keras would track what it is given.
        layer.__dict__["call"] = call
        self._calls.append((layer, call))

    def remove(self) -> None:
        """Give the layers their own calls again."""
        for layer, call in self._calls:
            if layer.__dict__.get("call") is call:
                del layer.__dict__["call"]
        self._calls = []

    # -- passes -----------------------------------------------------------------------------------

    def _run_pass(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model, or a layer of the root, with the root's variables gathered."""
        if self._pass is not None:
            return call(*args, **kwargs)
        with self._begin(args, kwargs) as now:
            root = self.all[0]
            use = now.number_use(root)
            for bucket in root.buckets:
                self._show(now, root, bucket, use)
            result = call(*args, **kwargs)
            self._note_last(result)
            return result

    @contextlib.contextmanager
    def _begin(self, args: Any, kwargs: Any) -> Iterator[Pass]:
        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
        self._pass = Pass([t for t in leaves if tf.is_tensor(t)])
        try:
            yield self._pass
        finally:
            self._pass = None

    def _show(self, now: Pass, unit: Unit, bucket: UnitBucket, use: int) -> None:
        """Gather a bucket until the pass, or the unit's call, ends."""
        how = self._collecting(unit, use)
        full = gathered_with_gradient(bucket, how, [*now.inputs, *self._last_of()])
        for variable, value in zip(bucket.variables, full, strict=True):
            now.shown[id(variable)] = (variable, value)

    def _run_unit(self, unit: Unit, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit's layer with its variables gathered."""
        if self._pass is None:
            with self._begin(args, kwargs):
                return self._run_unit(unit, call, args, kwargs)
        now = self._pass
        self._check_place(unit, now)
        use = now.number_use(unit)
        if unit.table is not None:
            result = self._look_up(unit, unit.table, use, *args, **kwargs)
        elif unit.recompute:
            outside = list(now.shown.values())
            how = self._collecting(unit, use)
            run = Recomputed(
                unit.name, unit.layer, call, unit.buckets, outside, how, unit.repeatable
            )
            before, now.in_unit = now.in_unit, unit.name
            try:
                result = run.run(args, kwargs)
            finally:
                now.in_unit = before
        else:
            shown_before = dict(now.shown)
            for bucket in unit.buckets:
                self._show(now, unit, bucket, use)
            try:
                result = call(*args, **kwargs)
            finally:
                now.shown = shown_before
        self._note_last(result)
        return result

    def _look_up(self, unit: Unit, table: RowTable, use: int, inputs: Any) -> Any:
        """What keras.layers.Embedding.call does, of rows that are fetched."""
        indices = tf.convert_to_tensor(inputs)
        if indices.dtype not in (tf.int32, tf.int64):
            indices = tf.cast(indices, tf.int32)
        name = f"{self.wire.prefix}/u{unit.number}.{use}"
        how = self._collecting(unit, use)
        self._note_first("Alltoall", f"{name}/indices")
        with after(self._last_of()):
            rows = table.look_up(tf.identity(indices), how, name, self.weigh)
        return tf.cast(rows, unit.layer.compute_dtype)

    def _check_place(self, unit: Unit, now: Pass) -> None:
        if current_graph() is not now.graph and compat.in_branch():
            raise ZeroError(
                f"the unit {unit.name!r} is called inside a branch or a loop of the graph "
                "(tf.cond, tf.while_loop): ranks that take different branches would wait for each "
                "other. Leave it out of `units=`, so that it belongs to the layer around it."
            )
        if now.in_unit:
            raise ZeroError(
                f"the unit {unit.name!r} is called inside the unit {now.in_unit!r}, of which it is "
                "no part: give zeroify a layer around both in `units=`"
            )

    # -- order ------------------------------------------------------------------------------------

    def _last_of(self) -> list[Any]:
        """What the last unit gave in this graph: the next one is gathered after it."""
        known = {} if tf.executing_eagerly() else kept_in_graph("last")
        return list(known.get(id(self), []))

    def _note_last(self, result: Any) -> None:
        """The next gather waits for this: as few units as possible are gathered at a time, and no
        name is ever in flight twice."""
        graph = current_graph()
        if graph is not None:
            leaves = tf.nest.flatten(result, expand_composites=True)
            tensors = [t for t in leaves if _is_in(t, graph)]
            if tensors:
                kept_in_graph("last")[id(self)] = tensors

    def _note_first(self, kind: str, name: str) -> None:
        if self.first_operation is None:
            self.first_operation = FirstOperation(kind, name)

    def _collecting(self, unit: Unit, use: int | str) -> Collecting:
        prefix = f"{self.wire.prefix}/u{unit.number}.{use}"

        def gather(bucket: UnitBucket, pieces: Any, wait_for: Any, when: str) -> Any:
            name = f"{prefix}/{when}{bucket.bucket.index}"
            self._note_first("Allgather", bucket.op_name(name))
            with self.wire.recorded_by(self.moved):
                waits = [*wait_for, *self._last_of()]
                full = bucket.gather_flat(pieces, name, waits, packed=True)
            self._note_last(full)
            return full

        def reduce(bucket: UnitBucket, packed: Any) -> list[Any]:
            name = f"{prefix}/reduce{bucket.bucket.index}"
            with compat.stop_recording(), self.wire.recorded_by(self.moved):
                found = bucket.reduce(packed, name, self.weigh, self._last_of())
            self._note_last(found)
            return found

        def connected(variable: Any) -> None:
            self.connected.add(id(variable))

        return Collecting(gather, reduce, connected, lambda: self.wire.recorded_by(self.moved))

    # -- values outside of a unit's call ----------------------------------------------------------

    def read(self, variable: Any) -> Any:
        """The whole value of a variable, where a pass has gathered it or can."""
        now = self._pass
        if now is None:
            return self._read_outside(variable)
        if id(variable) in now.shown:
            return now.shown[id(variable)][1]
        unit, bucket = self._bucket_of[id(variable)]
        if now.in_unit:
            raise ZeroError(
                f"the unit {now.in_unit!r} uses variable {variable.path!r} of the unit "
                f"{unit.name!r}, whose gradient would be lost: give zeroify a layer around both in "
                "`units=`, or leave the second one out of it"
            )
        self._show(now, unit, bucket, now.number_use(unit))
        return now.shown[id(variable)][1]

    def _read_outside(self, variable: Any) -> Any:
        """Outside of passes one rank alone has everything, and rank `_asking` may ask for it."""
        bucket = self.bucket_of(variable)
        place = [v is variable for v in bucket.variables].index(True)
        if self.is_alone():
            return bucket.gather(bucket.pieces(), "", [])[place]
        if self._asking is None:
            return None
        index = [b is bucket for b in self.buckets].index(True)
        if self._asked is None or self._asked[0] != index:
            self._asked = None  # freed before the next one is gathered
            self.wire.eager.broadcast_object(index, self._asking, name="zero/asked")
            self._asked = (index, self._gather_for_all(index))
        return self._asked[1][place]

    def _gather_for_all(self, index: int) -> list[Any]:
        bucket = self.buckets[index]
        return bucket.gather(bucket.pieces(), f"{self.wire.prefix}/u/asked", [])

    def is_alone(self) -> bool:
        return self.wire.size == 1

    @contextlib.contextmanager
    def readable_on(self, root: int) -> Iterator[None]:
        """Inside, rank `root` may read any variable, one after the other; the others, which enter
        it too, must do nothing inside: they help before the block begins."""
        if self.is_alone():
            yield
        elif self.wire.rank == root:
            self._asking = root
            try:
                yield
            finally:
                self._asking = self._asked = None
                self.wire.eager.broadcast_object(None, root, name="zero/asked")
        else:
            while True:
                index = self.wire.eager.broadcast_object(None, root, name="zero/asked")
                if index is None:
                    break
                self._gather_for_all(index)
            yield

    def regularize(self, variable: Any, regularizer: Callable[[Any], Any]) -> Any:
        """The loss of a regularizer that sees the whole value; every rank has all of it."""
        unit, bucket = self._bucket_of[id(variable)]
        place = [v is variable for v in bucket.variables].index(True)
        how = self._collecting(unit, f"regularizer.{place}")

        @tf.custom_gradient
        def loss_of(*pieces: Any) -> Any:
            with compat.stop_recording():
                full = bucket.split(how.gather(bucket, pieces, [], "forward"))
                loss = regularizer(full[place])

            def backward(grad: Any) -> Any:
                how.connected(variable)
                full = bucket.split(how.gather(bucket, pieces, [grad], "backward"))[place]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(full)
                    again = regularizer(full)
                grads: list[Any] = [None] * len(bucket.variables)
                grads[place] = tape.gradient(again, full, output_gradients=grad)
                return how.reduce(bucket, bucket.pack_gradients(grads))

            return loss, backward

        return loss_of(*bucket.pieces())

    def rewrite(self, variable: Any, change: Callable[[Any], Any]) -> list[Any]:
        """Replace a variable's value by `change(value)`, on all ranks."""
        unit, bucket = self._bucket_of[id(variable)]
        place = [v is variable for v in bucket.variables].index(True)
        name = f"{self.wire.prefix}/u{unit.number}/rewrite.{place}"
        values = bucket.gather(bucket.pieces(), name, [])
        values[place] = change(values[place])
        return bucket.put(bucket.pack(values))

    def is_connected(self, variable: Any) -> bool:
        """Whether a gradient of the variable has ever been computed on this rank."""
        return shard_of(variable) is None or id(variable) in self.connected


def _is_in(t: Any, graph: Any) -> bool:
    return tf.is_tensor(t) and getattr(t, "graph", None) is graph
