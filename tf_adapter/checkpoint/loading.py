"""From a checkpoint, or a plain file of weights, into a model and its optimizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from zerohvd.checkpoint import CheckpointMismatchError, session
from zerohvd.checkpoint.manifest import names_in
from zerohvd.checkpoint.matching import STATE, LoadPlan, Names, Slot, check_shape, state_span
from zerohvd.checkpoint.offline.weights_h5 import open_weights
from zerohvd.checkpoint.reader import ArraySource
from zerohvd.checkpoint.values import generators
from zerohvd.compression.policies import DROPPED, keeps_errors
from zerohvd.keras import compat
from zerohvd.keras.checkpoint.holdings import Holdings
from zerohvd.keras.optimizer import state
from zerohvd.keras.params.pieces import PieceVariable, shard_of
from zerohvd.layout import Bucket, Span

Array = np.ndarray[Any, Any]

_log = logging.getLogger("zerohvd")


class NumpyStaging:
    """Implements `zerohvd.checkpoint.matching.Staging`."""

    def allocate(self, length: int, dtype: str, *, zeros: bool) -> Array:
        return (np.zeros if zeros else np.empty)(length, _numpy(dtype))

    def destination(
        self, memory: Array, stored: str, factor: float | None
    ) -> memoryview | Callable[[int, memoryview], None]:
        if _numpy(stored) == memory.dtype and factor is None:
            return memory.view(np.uint8).data

        def take(start: int, block: memoryview) -> None:
            values = np.frombuffer(block, _numpy(stored)).astype(memory.dtype, copy=False)
            target = memory[start : start + values.size]
            if factor is None:
                target[:] = values
            else:
                target += values * np.asarray(factor, memory.dtype)

        return take


def _numpy(dtype: str) -> np.dtype[Any]:
    return np.dtype(tf.as_dtype(dtype).as_numpy_dtype)


class KerasTarget:
    """Implements `zerohvd.checkpoint.session.Target`.

    Group 0 of the plan is whatever lies outside buckets, group b + 1 the parameters of bucket b.
    """

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._step = None if held.optimizer is None else held.optimizer.step
        self.staging = NumpyStaging()

    def openers(self) -> Mapping[str, Callable[[Path], ArraySource]]:
        opener = functools.partial(open_weights, places=self._held.places)
        return {".weights.h5": opener, ".keras": opener}

    def names(self, stored: session.Stored) -> Names:
        """Models are matched by places in a .weights.h5 file, for Keras numbers layer names."""
        held = self._held
        about = stored.state if stored.complete else stored.manifest.state or {}
        at = {place: name for name, place in names_in(about, "weights_h5").items()}
        renamed = {name: at.get(place, name) for name, place in held.places.items()}
        unplaced = about.get("unplaced", []) if isinstance(about, Mapping) else []
        if not isinstance(unplaced, list) or not all(isinstance(n, str) for n in unplaced):
            raise CheckpointMismatchError("state.unplaced of the checkpoint is no list of names")
        if len(unplaced) == len(held.unplaced):
            renamed.update(zip(held.unplaced, unplaced, strict=True))
        # Plain files need not have the seeds of dropout layers.
        seeds = frozenset(held.others) - held.trainable_others
        return Names(held.variables, stored_as=renamed, optional=seeds)

    def plan(self, plan: LoadPlan, stored: session.Stored, *, strict: bool) -> None:
        plan.weights(self._slots())
        if self._step is not None and "scalars" not in stored.state and plan.matching.any_state():
            raise CheckpointMismatchError("it holds an optimizer's state, but not state.scalars")
        if self._step is not None and "scalars" in stored.state:
            scalars, saved_with = stored.state["scalars"], str(stored.state.get("optimizer"))
            if not isinstance(scalars, Mapping):
                raise CheckpointMismatchError("state.scalars of the checkpoint is not an object")
            self._plan_state(plan, saved_with)
            self._plan_local_sums(plan)
            self._plan_scalars(plan, scalars, saved_with)

    def _slots(self) -> Iterator[Slot]:
        for piece in () if self._step is None else self._step.pieces:
            span, bucket = Span(*piece.piece.param_span), piece.piece.bucket
            shape, dtype = tuple(piece.spec.shape), piece.dtype.name
            yield Slot(piece.spec.name, shape, span, dtype, _set(piece), group=bucket + 1)
        for name, variable in self._held.frozen.items():
            shard = shard_of(variable)
            if shard.span.length:
                slot = _slot_of(name, shard.piece, shard.span)
                yield dataclasses.replace(slot, shape=tuple(variable.shape))
        for name, variable in self._held.others.items():
            yield _slot_of(name, variable, per_rank=True)

    # -- the optimizer ----------------------------------------------------------------------------

    def _plan_state(self, plan: LoadPlan, saved_with: str) -> None:
        for slot in state.slots(self._held.optimizer):
            if slot.kind == state.MASTER:
                continue  # loaded with the parameter
            name, shape = slot.piece.spec.name, tuple(slot.piece.spec.shape)
            span = Span(*slot.piece.piece.param_span)
            info = plan.matching.find(f"{STATE}{slot.kind}", name)
            if info is not None:
                parts = [(info, 1.0)]
                span = state_span(info, name, shape, span)
                # What the optimizer itself has made: elementwise, or of a shape of its own.
                needed = shape if slot.is_elementwise else tuple(slot.variable.shape)
                if info.shape != needed:
                    raise ValueError(
                        f"{info.key!r} has shape {info.shape} in the checkpoint, which does not "
                        f"fit {slot.piece.path!r} of shape {shape}: {needed} is needed"
                    )
            elif slot.kind == compat.ACCUMULATED:
                # Stage 2 from a lower stage: the mean of what each rank had added up by itself.
                parts = plan.matching.reduced_local_grads(name)
                if not parts:
                    continue
                for part, _ in parts:
                    check_shape(part, name, shape)
            else:
                raise self._other_optimizer(f"holds no {slot.kind} of {name!r}", saved_with)
            plan.fill(_slot_of(name, slot.variable, span), parts)

    def _plan_local_sums(self, plan: LoadPlan) -> None:
        """Stages 0 and 1: what each rank has added up by itself."""
        for index, total in enumerate(self._step.local_sums):
            name = self._step.layout.params[index].name
            parts = plan.matching.local_grads(name)
            reduced = plan.matching.find(f"{STATE}{compat.ACCUMULATED}", name)
            if reduced is not None:
                parts.append((reduced, 1.0))  # the mean over ranks that all bring it is the same
            for part, _ in parts:
                check_shape(part, name, tuple(total.shape))
            if parts or plan.matching.any_local_grads(name):
                plan.fill(_slot_of(name, total), parts)

    def _plan_scalars(self, plan: LoadPlan, stored: Mapping[str, Any], saved_with: str) -> None:
        known = self._held.scalars
        missing = sorted(n for n in known if n not in stored and n != compat.LEARNING_RATE)
        if missing:
            raise self._other_optimizer(f"lacks {missing[0]!r} of the optimizer", saved_with)
        for name in known.keys() & stored.keys():
            value = _value_for(known[name], stored[name], f"scalars.{name}")
            plan.then(functools.partial(known[name].assign, value), group=-1)

    def _other_optimizer(self, what: str, saved_with: str) -> ValueError:
        here = type(self._held.optimizer.inner_optimizer).__name__
        return ValueError(
            f"the checkpoint {what}: it was saved with {saved_with}, this is {here}"
        )

    # -- taking effect ----------------------------------------------------------------------------

    def apply(self, plan: LoadPlan, stored: session.Stored) -> None:
        plan.apply()
        if self._step is not None:

            def prepare(bucket: Bucket) -> None:
                for piece in self._step.pieces_in(bucket):
                    piece.load()  # what the checkpoint lacks stays as it is
                plan.apply(bucket.index + 1)

            self._step.wire.new_traffic()
            self._step.assign_all(prepare)
            self._step.forget_errors()
            policy = self._step.config.wire
            if self._step.wire.rank == 0 and keeps_errors(policy):
                _log.info(DROPPED.format(policy))
        plan.apply(-1)

    def changes(self, stored: session.Stored) -> Iterator[session.Change]:
        return iter(())

    def prepare_generators(self, stored: Mapping[str, Any]) -> Callable[[], None]:
        acts = [generators.prepare(stored)]
        if "keras" in stored and compat.global_seed() is not None:
            seed = compat.global_seed().state
            value = _value_for(seed, stored["keras"], "the global seed of Keras")
            acts.append(lambda: seed.assign(value))

        def restore() -> None:
            for act in acts:
                act()

        return restore


def _value_for(variable: Any, stored: Any, what: str) -> Array:
    """What a variable is going to be; raises unless it is numbers of its shape and kind."""
    value = np.asarray(stored)
    shape, dtype = tuple(variable.shape), _numpy(tf.as_dtype(variable.dtype).base_dtype.name)
    if value.dtype.kind not in "biuf" or value.shape != shape:
        raise CheckpointMismatchError(
            f"{what} should be numbers of shape {shape} in the checkpoint, not {value.dtype} of "
            f"shape {value.shape}"
        )
    cast = value.astype(dtype)
    if not np.isfinite(value).all() or (dtype.kind in "biu" and (cast != value).any()):
        raise CheckpointMismatchError(f"{what} should be {dtype} in the checkpoint, not {value}")
    return cast


def _slot_of(
    name: str, variable: tf.Variable, span: Span | None = None, *, per_rank: bool = False
) -> Slot:
    """A variable that is filled whole, with the range `span` of the stored tensor."""
    shape = tuple(variable.shape)
    span = Span(0, int(np.prod(shape, dtype=np.int64))) if span is None else span

    def put(memory: Array) -> None:
        variable.assign(memory.reshape(shape))

    dtype = tf.as_dtype(variable.dtype).base_dtype.name
    return Slot(name, shape, span, dtype, put, per_rank)


def _set(piece: PieceVariable) -> Callable[[Array], None]:
    def put(memory: Array) -> None:
        piece.set(tf.constant(memory.reshape(piece.shape)))

    return put
