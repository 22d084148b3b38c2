"""What this rank holds of a model and its optimizer, by variable name and whatever the stage."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.optimizer import state
from zerohvd.keras.optimizer.distributed import unwrap
from zerohvd.keras.params.pieces import shard_of, tf_variable, variable_path


def places(model: Any) -> dict[Any, str]:
    """Variable (by reference) -> its place in a .weights.h5 file, which does not depend on the
    names that Keras gives to layers one after the other."""
    # The optimizer keeps its own state, and must not be asked for it here.
    around = getattr(model, "optimizer", None)  # a model that was not compiled has none
    skip = [part for part in (around, unwrap(around)) if part is not None]
    return compat.weights_places(model, skip)


class Holdings:
    """Everything of a model that a checkpoint stores.

    Attributes:
        names: Variable (by reference) -> its name.
        others: What the optimizer does not update, by name: statistics, seeds, frozen weights.
        frozen: Sharded weights that the optimizer does not update (stage 3), by name.
        scalars: Optimizer variables that all ranks hold alike.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer if optimizer is not None and optimizer.step is not None else None
        self.names: dict[Any, str] = {}
        self.variables: dict[str, tf.Variable] = {}
        if self.optimizer is not None:
            step = self.optimizer.step
            for spec, native in zip(step.layout.params, step.natives, strict=True):
                self._note(spec.name, native)
        updated = set(self.variables)
        self.frozen: dict[str, Any] = {}
        for variable in model.variables:
            native = tf_variable(variable)
            if native.ref() not in self.names:
                name = self._unique(variable_path(variable))
                self._note(name, native)
                if shard_of(variable) is not None:
                    self.frozen[name] = variable
        known = updated | set(self.frozen)
        self.others = {n: v for n, v in self.variables.items() if n not in known}
        self.places = {
            self.names[ref]: place for ref, place in places(model).items() if ref in self.names
        }

    @property
    def unplaced(self) -> list[str]:
        """Variables that no .weights.h5 file holds, in the model's order: seeds of dropout."""
        return [name for name in self.variables if name not in self.places]

    def _note(self, name: str, native: tf.Variable) -> None:
        self.names[native.ref()] = name
        self.variables[name] = native

    def _unique(self, path: str) -> str:
        name, count = path, 1
        while name in self.variables:
            count += 1
            name = f"{path}#{count}"
        return name

    @property
    def trainable_others(self) -> set[str]:
        """Frozen weights, as opposed to statistics and seeds."""
        weights = {tf_variable(v).ref() for v in self.model.weights}
        return {n for n, v in self.others.items() if v.ref() in weights}

    @property
    def scalars(self) -> dict[str, Any]:
        if self.optimizer is None:
            return {}
        found = {k.removeprefix("scalar:"): v for k, v in state.scalars(self.optimizer).items()}
        around = getattr(self.model, "optimizer", None)
        if around is not self.optimizer and around is not None:  # a LossScaleOptimizer
            for attribute, value in sorted(vars(around).items()):
                if isinstance(value, keras.Variable) and not value.ndim:
                    found[f"scaler.{attribute}"] = value
        return found
