"""The parameters of a layout, from a Keras model's variables."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from zerohvd.keras.params.pieces import tf_variable, variable_path
from zerohvd.layout import ParamSpec
from zerohvd.training.naming import unique_names

# Names of variables whose gradients are tf.IndexedSlices; `build` sees variables, not gradients.
_TABLE = re.compile("embed|table")


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
        dtype = tf_variable(variable).dtype.base_dtype.name
        looks_so = len(variable.shape) > 1 and _TABLE.search(path.split("/")[-1].lower())
        group = name if index in tables or looks_so else 0
        specs.append(ParamSpec(name, tuple(variable.shape), dtype, group))
    return specs
