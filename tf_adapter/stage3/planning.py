"""A Keras model as the tree that the core divides into units."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from zerohvd.keras import compat
from zerohvd.keras.params.pieces import variable_path
from zerohvd.keras.stage3.rows import is_large_table
from zerohvd.layout import ParamSpec
from zerohvd.stage3.planning import ModelPlan, Node, PlannedParam, UnitOptions, plan_units
from zerohvd.training.naming import unique_names

PERSISTENT = "(persistent)"


class Plan:
    """Which variables of a model are gathered together.

    Attributes:
        model_plan: The core's; it knows a variable by its `id`.
        variables: id -> variable, of all weights that training may change.
    """

    def __init__(self, model: Any, options: UnitOptions) -> None:
        self.variables: dict[int, Any] = {}
        for layer in compat.all_layers(model):
            self.variables.update((id(v), v) for v in compat.own_weights(layer) if _is_float(v))
        names = unique_names([variable_path(v) for v in self.variables.values()])
        self._names = dict(zip(self.variables, names, strict=True))
        self.tree = self._node(model, "", top=True)
        if options.units is None:
            chosen = self._blocks(options) or list(_layers_with_weights(self.tree))
            if chosen:
                options = dataclasses.replace(options, units=chosen)
        self.model_plan: ModelPlan = self._plan(self._with_tables(options))

    def homes(self, variables: Sequence[Any]) -> dict[int, tuple[str, int | None]]:
        """By `id`: what a variable shares buckets with, and its unit; None: it is never sharded."""
        found: dict[int, tuple[str, int | None]] = {}
        parts = self.model_plan.divide([id(v) for v in variables])
        for index, (number, members) in enumerate(parts):
            label = PERSISTENT if number is None else f"unit {number}.{index}"
            found.update((p, (label, number)) for p in members)
        return found

    def _plan(self, options: UnitOptions) -> ModelPlan:
        return plan_units(self.tree, options, base=keras.layers.Layer, noun="layer")

    def _with_tables(self, options: UnitOptions) -> UnitOptions:
        """Large embedding tables are units of their own, inside of another one too: it would gather
        them whole."""
        found = [unit.module for unit in self._plan(options).units[1:]]
        nodes = [n for n in self.tree.walk() if n.can_be_unit and is_large_table(n.module)]
        chosen = {id(unit) for unit in found}
        tables = [n.module for n in nodes if id(n.module) not in chosen]
        if not tables:
            return options
        return dataclasses.replace(options, units=[*found, *tables])

    def _blocks(self, options: UnitOptions) -> list[Any]:
        """Composite layers that repeat: a transformer's blocks, nested models."""
        nodes = {node.module: node for node in self.tree.walk()}
        found = [unit.module for unit in self._plan(options).units[1:]]
        return [module for module in found if nodes[module].children]

    def _node(self, layer: Any, name: str, *, top: bool = False, inside: bool = False) -> Node:
        """The tree below a layer; `inside`: a layer of Keras' own runs it, perhaps in a loop."""
        path = f"{name}/" if name else ""
        hides = inside or (_is_keras_own(layer) and not isinstance(layer, keras.Model))
        children = tuple(
            self._node(child, f"{path}{child.name}", inside=hides)
            for child in compat.sublayers(layer)
        )
        params = tuple(
            PlannedParam(self._spec(v), id(v)) for v in compat.own_weights(layer) if _is_float(v)
        )
        contains = top or isinstance(layer, keras.Model) or _has_list_of_layers(layer)
        return Node(
            name,
            layer,
            type(layer),
            children,
            params,
            is_container=contains and not hides,
            can_be_unit=not inside,
        )

    def _spec(self, variable: Any) -> ParamSpec:
        dtype = compat.stored_dtype(variable)
        return ParamSpec(self._names[id(variable)], tuple(variable.shape), dtype)


def _is_float(variable: Any) -> bool:
    return "float" in compat.stored_dtype(variable)


def _is_keras_own(layer: Any) -> bool:
    return type(layer).__module__.partition(".")[0] == "keras"


def _has_list_of_layers(layer: Any) -> bool:
    held = [v for v in vars(layer).values() if isinstance(v, (list, tuple))]
    return any(sum(isinstance(x, keras.layers.Layer) for x in v) > 1 for v in held)


def _layers_with_weights(node: Node) -> Iterator[Any]:
    """The outermost layers that are no models and have weights."""
    for child in node.children:
        if isinstance(child.module, keras.Model):
            yield from _layers_with_weights(child)
        elif child.has_params:
            yield child.module
