"""Names and native variables behind what Keras hands out."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from zerohvd.layout import ParamSpec

# Names of variables whose gradients are tf.IndexedSlices; `build` sees variables, not gradients.
_TABLE = re.compile("embed|table")


def tf_variable(variable: Any) -> Any:
    """The tf.Variable behind a keras.Variable; a tf.Variable is one itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def variable_path(variable: Any) -> str:
    return getattr(variable, "path", None) or str(variable.name).split(":")[0]


def param_specs(variables: Sequence[Any], tables: Collection[int]) -> list[ParamSpec]:
    """Unique names, shapes and dtypes. An embedding table gets a bucket of its own: only then can
    its gradient be sent as rows.

    Args:
        variables: The model's.
        tables: The indices of those whose gradients are known to be tf.IndexedSlices.
    """
    seen: dict[str, int] = {}
    specs = []
    for index, variable in enumerate(variables):
        path = variable_path(variable)
        count = seen[path] = seen.get(path, 0) + 1
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"variable {path!r} is overwritten with its gradient (float8 training), which "
                "zerohvd does not support"
            )
        dtype = tf_variable(variable).dtype.base_dtype.name
        name = path if count == 1 else f"{path}#{count}"
        looks_so = len(variable.shape) > 1 and _TABLE.search(path.split("/")[-1].lower())
        group = name if index in tables or looks_so else 0
        specs.append(ParamSpec(name, tuple(variable.shape), dtype, group))
    return specs
