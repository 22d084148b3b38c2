"""A Keras model and its optimizer as the core plans them: nothing is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from zerohvd.config import ZeroConfig
from zerohvd.keras import compat
from zerohvd.keras.communication.arrays import nbytes
from zerohvd.keras.gradients.graph_memory import measure
from zerohvd.keras.params.shards import specs_of
from zerohvd.keras.stage3.initial.deferred import deferred_init
from zerohvd.keras.stage3.planning import Plan
from zerohvd.keras.stage3.rows import is_large_table
from zerohvd.layout import Layout
from zerohvd.numerics import master_dtype
from zerohvd.planning.timeline import Timeline
from zerohvd.planning.workload import ROWS, OptimizerCost, Section, Workload
from zerohvd.stage3.planning import UnitOptions
from zerohvd.training.graph import IN_FLIGHT, lay_out

_ELEMENTS = 64  # of a variable that stands for others


def describe(
    model: Any,
    optimizer: Any,
    config: ZeroConfig,
    partition: str,
    units: UnitOptions,
    *,
    batch: Any = None,
    loss: Callable[[Any], Any] | None = None,
) -> Workload:
    """What a built model and its optimizer will need.

    Args:
        optimizer: The plain one.
        config: Its stage does not count.
        partition: "flat" or "parameter".
        units: As for stage 3.
        batch: What the model is called with, of one step on one rank: tensors, arrays or
            tf.TensorSpec; None: activations are not measured.
        loss: Of the model's output; None: its sum.
    """
    trained = list(model.trainable_variables)
    others = [v for v in model.variables if not v.trainable]
    timeline, unmeasured = None, "no batch was given"
    if batch is not None:
        timeline, unmeasured = _measured(model, batch, loss)
    name = f"{type(model).__name__}, {model.count_params():,} parameters"
    return Workload(
        name=name,
        framework="keras",
        sections=_Sections(model, trained, config, partition, units),
        optimizer=_optimizer_cost(optimizer, trained, config, whole=partition == "parameter"),
        master_dtype=config.master_dtype,
        fixed=sum(nbytes(v) for v in others),
        full_grads_below=3,
        keeps_grads=False,
        in_flight=IN_FLIGHT,
        copies_received=True,
        timeline=timeline,
        unmeasured=unmeasured,
    )


class _Sections:
    """The sections of a stage, as DistributedOptimizer makes them."""

    def __init__(
        self,
        model: Any,
        trained: Sequence[Any],
        config: ZeroConfig,
        partition: str,
        units: UnitOptions,
    ) -> None:
        self._trained, self._config, self._partition = trained, config, partition
        plan = Plan(model, units)
        self._homes = plan.homes([v for v in trained if id(v) in plan.variables])
        planned = enumerate(plan.model_plan.units)
        self._tables = {number for number, unit in planned if is_large_table(unit.module)}

    def __call__(self, stage: int, size: int) -> list[Section]:
        config = dataclasses.replace(self._config, stage=stage)
        numbers = tuple(range(len(self._trained)))
        if stage < 3 or size == 1:
            layout = lay_out(specs_of(self._trained, ()), self._partition, config, size)
            return [Section(layout, numbers, (None,) * len(layout.buckets))]
        specs = [
            dataclasses.replace(spec, group=self._homes[id(v)][0])
            for spec, v in zip(specs_of(self._trained, ()), self._trained, strict=True)
        ]
        layout = lay_out(specs, self._partition, config, size)
        return [Section(layout, numbers, self._units(layout))]

    def _units(self, layout: Layout) -> tuple[int | None, ...]:
        firsts = [self._trained[bucket.slots[0].param] for bucket in layout.buckets]
        units = [self._homes[id(v)][1] for v in firsts]
        return tuple(ROWS if unit in self._tables else unit for unit in units)


def _optimizer_cost(
    optimizer: Any, trained: Sequence[Any], config: ZeroConfig, *, whole: bool
) -> OptimizerCost:
    """What the optimizer keeps, found by building a copy of it on variables without memory."""
    updated = [master_dtype(compat.stored_dtype(v), config.master_dtype) for v in trained]
    found: dict[Any, tuple[int, int]] = {}
    for variable, dtype in zip(trained, updated, strict=True):
        shape = tuple(variable.shape) if whole else (_ELEMENTS,)
        if (shape, dtype) not in found:
            found[shape, dtype] = _built(optimizer, shape, dtype)
    name = type(optimizer).__name__
    fixed = max((rest for _, rest in found.values()), default=0)
    if whole:
        states = {
            i: found[tuple(v.shape), dtype][0]
            for i, (v, dtype) in enumerate(zip(trained, updated, strict=True))
        }
        return OptimizerCost(name=name, per_element={}, whole=states, fixed=fixed)
    per_element = {dtype: state / _ELEMENTS for (_, dtype), (state, _) in found.items()}
    return OptimizerCost(name=name, per_element=per_element, fixed=fixed)


def _built(optimizer: Any, shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """Bytes of state for one variable, and of what there is once."""
    with deferred_init():
        copied = type(optimizer).from_config(optimizer.get_config())
        variable = keras.Variable(initializer="zeros", shape=shape, dtype=dtype)
        copied.build([variable])
    sizes = [(tuple(v.shape), nbytes(v)) for v in copied.variables]
    state = sum(size for shape_, size in sizes if shape_ != ())
    return state, sum(size for shape_, size in sizes if shape_ == ())


def _measured(
    model: Any, batch: Any, loss: Callable[[Any], Any] | None
) -> tuple[Timeline | None, str]:
    def spec(value: Any) -> tf.TensorSpec:
        if isinstance(value, tf.TensorSpec):
            return value
        return tf.TensorSpec(value.shape, tf.as_dtype(value.dtype))

    try:
        return measure(model, tf.nest.map_structure(spec, batch), loss), ""
    except Exception as error:  # whatever the user's model raises
        reason = str(error).strip().splitlines() or [""]
        return None, f"the step could not be traced ({type(error).__name__}: {reason[0]})"
