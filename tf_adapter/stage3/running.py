"""A unit's call: its variables are gathered, the layer runs, and backward recomputes it.

`keeping` gathers with a gradient: TensorFlow keeps what backward needs, the gathered variables
among it. `recomputing` lets nothing survive but the inputs: backward gathers again and calls the
layer once more, with the same seeds and statistics, and discards what it assigns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from zerohvd.errors import ZeroError
from zerohvd.keras import compat
from zerohvd.keras.communication.recurring import recurring
from zerohvd.keras.stage3.repeatable import check_repeatable
from zerohvd.keras.stage3.storage import UnitBucket

Reduce = Callable[[UnitBucket, Any], list[Any]]
Gather = Callable[[UnitBucket, Sequence[Any], Sequence[Any], str], Any]


class Collecting(NamedTuple):
    """How the buckets of a call are gathered and reduced."""

    gather: Gather  # (bucket, pieces, what to wait for, "forward" or "backward"): 1-D
    reduce: Reduce  # (bucket, packed gradients)
    connected: Callable[[Any], None]  # told of every variable that has a gradient
    recorded: Callable[[], contextlib.AbstractContextManager[None]]  # what moves inside


def gathered_with_gradient(bucket: UnitBucket, how: Collecting, wait_for: Sequence[Any]) -> Any:
    """The whole variables of a bucket; their gradients are reduced over the ranks."""

    @tf.custom_gradient
    def gather(*pieces: Any) -> Any:
        with compat.stop_recording():
            full = bucket.split(how.gather(bucket, pieces, wait_for, "forward"))

        def backward(*grads: Any) -> Any:
            return _reduced_once(bucket, how, [tf.convert_to_tensor(g) for g in grads])

        return tuple(full), backward

    return [
        _noting(variable, full, how) if variable.trainable else tf.stop_gradient(full)
        for variable, full in zip(bucket.variables, gather(*bucket.pieces()), strict=True)
    ]


def _reduced_once(bucket: UnitBucket, how: Collecting, grads: Sequence[Any]) -> Any:
    """Reduced gradients, which have no gradient themselves: a tape around the tape may see them,
    as in a gradient penalty, but must not need them."""

    @tf.custom_gradient
    def reduce(*given: Any) -> Any:
        with compat.stop_recording():
            reduced = how.reduce(bucket, bucket.pack_gradients(given))

        def backward(*_: Any) -> Any:
            raise ZeroError(
                f"a gradient of the gradient of {bucket.name!r} is wanted: of sharded variables "
                "only the gradient itself can be computed"
            )

        return tuple(reduced), backward

    return reduce(*grads)


def _noting(variable: Any, full: Any, how: Collecting) -> Any:
    """The same tensor, which tells when there is a gradient: TensorFlow makes zeros where none is,
    and Keras leaves such a variable alone."""

    @tf.custom_gradient
    def note(x: Any) -> Any:
        def backward(grad: Any) -> Any:
            how.connected(variable)
            return grad

        return tf.identity(x), backward

    return note(full)


class _Arguments:
    """A call's arguments, as tensors and everything else."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._structure = (args, kwargs)
        leaves = tf.nest.flatten(self._structure, expand_composites=True)
        self._leaves = [tf.convert_to_tensor(x) if _is_variable(x) else x for x in leaves]
        self._places = [i for i, x in enumerate(self._leaves) if tf.is_tensor(x)]
        self.tensors = [self._leaves[i] for i in self._places]
        self.masks = [compat.get_mask(t) for t in self.tensors]

    def packed(self, tensors: Sequence[Any]) -> Any:
        """(args, kwargs) with these tensors."""
        leaves = list(self._leaves)
        for place, tensor, mask in zip(self._places, tensors, self.masks, strict=True):
            if mask is not None and compat.get_mask(tensor) is None:
                compat.set_mask(tensor, mask)
            leaves[place] = tensor
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)


def _is_variable(x: Any) -> bool:
    return isinstance(x, (keras.Variable, tf.Variable))


class _Results:
    """What a call has returned, as tensors and everything else."""

    def __init__(self, outputs: Any, losses: Sequence[Any]) -> None:
        self._structure = outputs
        self._leaves = tf.nest.flatten(outputs, expand_composites=True)
        self._places = [i for i, x in enumerate(self._leaves) if tf.is_tensor(x)]
        found = [self._leaves[i] for i in self._places]
        masks = [compat.get_mask(t) for t in found]
        self._masked = [i for i, m in enumerate(masks) if m is not None]
        self._count = len(found)
        self.tensors = [*found, *losses, *(m for m in masks if m is not None)]
        self._losses = len(losses)

    def packed(self, tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
        """(outputs, losses) with these tensors."""
        found = list(tensors[: self._count])
        losses = list(tensors[self._count : self._count + self._losses])
        for place, mask in zip(self._masked, tensors[self._count + self._losses :], strict=True):
            compat.set_mask(found[place], mask)
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, found, strict=True):
            leaves[place] = tensor
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True), losses


class Recomputed:
    """One call of a unit that backward repeats.

    Args:
        name: The unit's, for errors.
        layer: The unit's layer.
        call: The layer's own `call`.
        buckets: The unit's.
        outside: Variables of other units that are gathered now, with their values.
        how: How to gather and reduce.
        checked: Says, or is told, whether the unit is known to be repeatable.
    """

    def __init__(
        self,
        name: str,
        layer: Any,
        call: Callable[..., Any],
        buckets: Sequence[UnitBucket],
        outside: Sequence[tuple[Any, Any]],
        how: Collecting,
        checked: Callable[..., bool],
    ) -> None:
        self._checked = checked
        self._name, self._layer, self._call, self._how = name, layer, call, how
        self._buckets = buckets
        sharded = {id(v) for b in buckets for v in b.variables}
        rest = {id(v): v for v in layer.variables if id(v) not in sharded}
        seed = compat.ensure_global_seed().state
        rest[id(seed)] = seed
        self._small = [v for v in rest.values() if v.trainable and _is_float(v)]
        known = {id(v) for v in self._small} | sharded
        outside = [(v, x) for v, x in outside if id(v) not in known]
        self._outside = [v for v, _ in outside]
        self._values = [*(compat.stored_value(v) for v in self._small), *(x for _, x in outside)]
        # Seeds and statistics, as the forward pass finds them.
        self._states = [v for v in rest.values() if id(v) not in known]
        self._before = [compat.stored_value(v) for v in self._states]
        self._state = compat.call_state()
        self._made: _Results | None = None

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the layer; returns its outputs."""
        arguments = _Arguments(args, kwargs)
        pieces = [p for b in self._buckets for p in b.pieces()]
        inputs = [*arguments.tensors, *self._values, *pieces]
        if not self._checked() and compat.is_recorded(inputs):
            self._check(arguments)

        @tf.custom_gradient
        def unit(*given: Any) -> Any:
            with compat.stop_recording():
                made = self._forward(arguments, given)

            def backward(*grads: Any, variables: Any = ()) -> Any:
                found = self._backward(arguments, given, grads, list(variables or ()))
                count = len(given)
                return (found[:count], found[count:]) if variables else found

            return tuple(made), backward

        outputs = unit(*inputs)
        assert self._made is not None
        result, losses = self._made.packed(outputs)
        for loss in losses:
            self._layer.add_loss(loss)
        return result

    def _check(self, arguments: _Arguments) -> None:
        """Raise if backward would compute something else than forward; once per unit."""
        shards = [v for b in self._buckets for v in b.variables]
        whole = [tf.TensorSpec(v.shape, compat.stored_dtype(v)) for v in shards]
        counts = len(arguments.tensors), len(self._values), len(self._before)

        def call(*given: Any) -> Any:
            parts = [iter(given)]
            tensors, values, states = ([next(parts[0]) for _ in range(n)] for n in counts)
            mapping = [*self._mapping(list(parts[0]), values)]
            mapping += zip(self._states, states, strict=True)
            with _scope(mapping) as scope:
                args, kwargs = arguments.packed(tensors)
                return _Results(self._call(*args, **kwargs), scope.losses).tensors

        with compat.unchanged(self._layer):
            check_repeatable(
                self._name, call, [*arguments.tensors, *self._values, *self._before, *whole]
            )
        self._checked(True)

    def _split(self, arguments: _Arguments, given: Sequence[Any]) -> tuple[Any, Any, Any]:
        n, m = len(arguments.tensors), len(self._values)
        return given[:n], given[n : n + m], given[n + m :]

    def _gather(self, pieces: Sequence[Any], wait_for: Sequence[Any], when: str) -> list[Any]:
        """Whole buckets, 1-D."""
        parts = self._by_bucket(pieces)
        return [self._how.gather(bucket, mine, wait_for, when) for bucket, mine in parts]

    def _split_buckets(self, flats: Sequence[Any]) -> list[Any]:
        """Whole variables, in whole buckets."""
        return [v for b, flat in zip(self._buckets, flats, strict=True) for v in b.split(flat)]

    def _mapping(self, full: Sequence[Any], values: Sequence[Any]) -> list[tuple[Any, Any]]:
        sharded = [v for b in self._buckets for v in b.variables]
        return [
            *zip(sharded, full, strict=True),
            *zip([*self._small, *self._outside], values, strict=True),
        ]

    def _forward(self, arguments: _Arguments, given: Sequence[Any]) -> list[Any]:
        tensors, values, pieces = self._split(arguments, given)
        full = self._split_buckets(self._gather(pieces, tensors, "forward"))
        mapping = [*self._mapping(full, values), *zip(self._states, self._before, strict=True)]
        with _scope(mapping) as scope:
            args, kwargs = arguments.packed(tensors)
            outputs = self._call(*args, **kwargs)
        self._made = _Results(outputs, scope.losses)
        self._assign(scope, mapping)
        return self._made.tensors

    def _assign(self, scope: Any, mapping: Sequence[tuple[Any, Any]]) -> None:
        """Let what the layer has assigned take effect."""
        for variable, before in mapping:
            now = scope.get_current_value(variable)
            if now is not before:
                variable.assign(now)
        if len(scope.state_mapping) > len(mapping):
            raise ZeroError(
                f"the call of {self._name!r} assigns to a variable that is not its own: its layers "
                "must hold every variable that they assign to. Or give recompute=False to zeroify"
            )

    def _backward(
        self, arguments: _Arguments, given: Sequence[Any], grads: Any, variables: list[Any]
    ) -> list[Any]:
        """The gradients of `given`, and of variables that belong to no unit."""
        present = [tf.convert_to_tensor(g) for g in grads if g is not None]
        if compat.is_recorded([*present, *given]):
            raise ZeroError(
                f"a tape records the backward pass of {self._name!r}: gradients of gradients, such "
                "as a gradient penalty, need recompute=False in zeroify. (A persistent tape must "
                "be left before tape.gradient is called.)"
            )
        tensors, values, pieces = self._split(arguments, given)
        flats = self._gather(pieces, present, "backward")
        groups = (tensors, values, self._before, flats, present)
        found: list[Any] = []  # gradients, as the function below has them

        def body(*everything: Any) -> Any:
            rest = iter(everything)
            mine = [[next(rest) for _ in group] for group in groups]
            found[:] = self._gradients(arguments, mine, [g is not None for g in grads], variables)
            return [t for t in tf.nest.flatten(found, expand_composites=True) if t is not None]

        with compat.unchanged(self._layer):
            made = iter(recurring(body, [t for group in groups for t in group]))
        leaves = tf.nest.flatten(found, expand_composites=True)
        leaves = [t if t is None else next(made) for t in leaves]
        results = tf.nest.pack_sequence_as(found, leaves, expand_composites=True)
        inner, full, own = results
        # Packed out here: inside, the whole buckets would still be held.
        return [*inner, *self._reduce(full), *own]

    def _gradients(
        self,
        arguments: _Arguments,
        inputs: Sequence[Sequence[Any]],
        present: Sequence[bool],
        variables: Sequence[Any],
    ) -> list[Any]:
        """Call the layer again. Returns three lists: the gradients of arguments and values, those
        of the unit's variables, 1-D, and those of `variables`.

        Args:
            inputs: Arguments, values, states, whole buckets, and gradients of the results.
            present: Which of the results have a gradient.
        """
        tensors, values, states, flats, given = inputs
        # A tensor may be given twice, and each place has a gradient of its own.
        tensors, values = [tf.identity(t) for t in tensors], [tf.identity(t) for t in values]
        full = self._split_buckets(flats)
        shards = [v for b in self._buckets for v in b.variables]
        wanted = [x for v, x in zip(shards, full, strict=True) if v.trainable]
        sources = [t for t in (*tensors, *values) if t.dtype.is_floating or t.dtype.is_complex]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*sources, *wanted, *variables])
            mapping = [*self._mapping(full, values), *zip(self._states, states, strict=True)]
            with _scope(mapping) as scope, compat.in_call_state(self._state):
                args, kwargs = arguments.packed(tensors)
                made = _Results(self._call(*args, **kwargs), scope.losses)
        results = [y for y, there in zip(made.tensors, present, strict=True) if there]
        pairs = [(y, g) for y, g in zip(results, given, strict=True) if y.dtype.is_floating]
        found = tape.gradient(
            [y for y, _ in pairs],
            [*sources, *wanted, *variables],
            output_gradients=[g for _, g in pairs],
        )
        by_id = {id(t): g for t, g in zip([*sources, *wanted], found, strict=False)}
        own = found[len(sources) + len(wanted) :]
        inner = [by_id.get(id(t)) for t in (*tensors, *values)]
        return [inner, self._flatten([by_id.get(id(x)) for x in full]), list(own)]

    def _flatten(self, grads: Sequence[Any]) -> list[Any]:
        """Gradients of the unit's variables, 1-D."""
        flats: list[Any] = []
        for bucket, mine in self._by_bucket(grads):
            for variable, grad in zip(bucket.variables, mine, strict=True):
                if grad is not None:
                    self._how.connected(variable)
            flats += bucket.flatten_gradients(mine)
        return flats

    def _reduce(self, grads: Sequence[Any]) -> list[Any]:
        """This rank's parts of the gradients of the unit's variables."""
        reduced: list[Any] = []
        for bucket, mine in self._by_bucket(grads):
            if any(v.trainable for v in bucket.variables):
                reduced += self._how.reduce(bucket, bucket.pack_gradients(mine))
            else:
                reduced += [None] * len(mine)
        return reduced

    def _by_bucket(self, values: Sequence[Any]) -> Iterator[tuple[UnitBucket, Sequence[Any]]]:
        start = 0
        for bucket in self._buckets:
            stop = start + len(bucket.variables)
            yield bucket, values[start:stop]
            start = stop


def _is_float(variable: Any) -> bool:
    return "float" in compat.stored_dtype(variable)


@contextlib.contextmanager
def _scope(mapping: Sequence[tuple[Any, Any]]) -> Iterator[Any]:
    """Layers inside see these values of variables, and assign to none."""
    scope = keras.StatelessScope(collect_losses=True, initialize_variables=False)
    for variable, value in mapping:
        # Not by `state_mapping=`, which casts to the dtype of mixed precision.
        scope.add_update((variable, value))
    with scope:
        yield scope
