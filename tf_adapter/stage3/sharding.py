"""From a built model to one whose variables are sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from zerohvd.config import ZeroConfig
from zerohvd.keras import compat
from zerohvd.keras.communication.wire import Wire
from zerohvd.keras.params.pieces import shard_of
from zerohvd.keras.params.shards import specs_of
from zerohvd.keras.stage3.initial.drawing import Recipe, recipe_of
from zerohvd.keras.stage3.placeholder import is_sharded
from zerohvd.keras.stage3.planning import Plan
from zerohvd.keras.stage3.rows import RowTable, is_large_table, row_multiple
from zerohvd.keras.stage3.storage import UnitBucket
from zerohvd.keras.stage3.units import Unit, Units
from zerohvd.layout import Layout
from zerohvd.stage3.planning import UnitOptions
from zerohvd.training.graph import lay_out


@dataclasses.dataclass(frozen=True)
class ShardedModel:
    """A model whose variables are sharded.

    Attributes:
        units: Its units.
        variables: What the optimizer updates, small ones included, in the model's order.
        layout: Of `variables`.
        frozen: Sharded weights that were not trainable.
    """

    units: Units
    variables: tuple[Any, ...]
    layout: Layout
    frozen: tuple[Any, ...]


def shard_model(
    model: Any,
    options: UnitOptions,
    recompute: bool | Callable[[Any], bool],
    config: ZeroConfig,
    partition: str,
    wire: Wire,
    *,
    broadcast: bool,
) -> ShardedModel:
    """Shard the variables of a built model; all ranks call it."""
    before = {id(u): u for u in (shard_of(v).home for v in model.variables if is_sharded(v))}
    plan = Plan(model, options)
    plan.model_plan.check(options, wire.eager)
    units = Units([Unit(u, i) for i, u in enumerate(plan.model_plan.units)], wire)
    _choose_recomputed(units, recompute)
    trained = [v for v in model.trainable_variables if id(v) in plan.variables]
    frozen = [v for v in plan.variables.values() if not v.trainable]
    layout = _section(plan, units, trained, partition, config)
    _section(plan, units, frozen, partition, config)
    for unit in units.all[1:]:
        if is_large_table(unit.layer) and len(unit.buckets) == 1:
            unit.table = RowTable.of(unit.buckets[0], wire)
    _fill(units, broadcast)
    _embody(model)
    for old in before.values():
        old.remove()
    units.install()
    frozen = [v for v in frozen if is_sharded(v)]
    return ShardedModel(units, tuple(trained), layout, tuple(frozen))


def _fill(units: Units, broadcast: bool) -> None:
    """Give every rank its parts of the first values."""
    recipes = [[recipe_of(v) for v in bucket.variables] for bucket in units.buckets]
    if broadcast and not units.is_alone():
        # Ranks may have other seeds, and what has memory on one may be deferred on another.
        said = units.wire.eager.broadcast_object(recipes, 0, name="zero/u/recipes")
        recipes = [[r if r is None else Recipe(*r) for r in found] for found in said]
    for bucket, found in zip(units.buckets, recipes, strict=True):
        bucket.fill(units, found, broadcast=broadcast)


def _choose_recomputed(units: Units, recompute: bool | Callable[[Any], bool]) -> None:
    """Innermost units are recomputed: a unit around others would gather them twice more."""
    layers = {id(u.layer) for u in units.all[1:]}
    for unit in units.all[1:]:
        inner = {id(x) for x in compat.all_layers(unit.layer)} - {id(unit.layer)}
        wanted = recompute(unit.layer) if callable(recompute) else recompute
        unit.recompute = bool(wanted) and not inner & layers


def _section(
    plan: Plan, units: Units, variables: Sequence[Any], partition: str, config: ZeroConfig
) -> Layout:
    """Lay out variables so that buckets hold those of one unit, and tell the units."""
    home = plan.homes(variables)
    size = units.wire.size
    multiples = {
        id(compat.own_weights(u.layer)[0]): row_multiple(u.layer, size)
        for u in units.all[1:]
        if is_large_table(u.layer)
    }
    specs = [
        dataclasses.replace(spec, group=home[id(v)][0], multiple=multiples.get(id(v), 1))
        for spec, v in zip(specs_of(variables, ()), variables, strict=True)
    ]
    layout = lay_out(specs, partition, config, size)
    for bucket in layout.buckets:
        number = home[id(variables[bucket.slots[0].param])][1]
        if number is not None:
            unit = units.all[number]
            units.add(unit, UnitBucket(layout, bucket, variables, units.wire, config.reduce_dtype))
    return layout


def _embody(model: Any) -> None:
    """Give memory to variables that were deferred and are not sharded."""
    for variable in model.variables:
        if compat.native_variable(variable) is None:
            compat.realise(variable)


def check_shardable(model: Any) -> None:
    """Raise ValueError or TypeError if the model cannot be sharded."""
    if not hasattr(model, "trainable_variables"):
        raise TypeError(f"zeroify needs a keras.Model, got {type(model).__name__}")
    if not model.built or not model.variables:
        raise ValueError(
            "stage 3 needs a built model: give it an Input, call model.build(input_shape), or call "
            "it on a batch before zeroify"
        )
