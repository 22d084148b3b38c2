"""Where the variables of a Keras model lie in buckets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from zerohvd.config import MIB, ZeroConfig
from zerohvd.keras.optimizer import partition
from zerohvd.keras.params.pieces import tf_variable, variable_path
from zerohvd.layout import Layout, ParamSpec, build_layout

# glibc gives blocks beyond this back to the system, and takes a page fault for each of their
# pages in every step: a collective on 64 MiB was measured six times slower than four on 16 MiB.
_CHUNK_BYTES = 32 * MIB
_NO_CHUNKS = 1 << 62

# What a variable is called whose gradient comes as rows; `build` sees variables, not gradients.
_TABLE = re.compile("embed|table")


def lay_out(
    variables: Sequence[Any], inner: Any, config: ZeroConfig, size: int, tables: set[int]
) -> Layout:
    """The layout, for one rank at stage 0, where everybody holds everything.

    Args:
        variables: The model's.
        inner: The optimizer that will update them.
        config: Settings.
        size: How many ranks there are.
        tables: The variables whose gradients are known to come as rows.
    """
    sharded = config.stage > 0
    how = partition.choose(inner, config.partition)
    specs = _specs(variables, tables)
    chunk = max(_CHUNK_BYTES, config.bucket_bytes)
    # The rows of a table are sent for the whole of it.
    large_table = any(s.group and s.nbytes > chunk for s in specs)
    whole = how == "parameter" or not sharded or size == 1 or large_table
    return build_layout(
        specs,
        size if sharded else 1,
        bucket_bytes=config.bucket_bytes,
        partition=how,
        chunk_bytes=_NO_CHUNKS if whole else chunk,
    )


def _specs(variables: Sequence[Any], tables: set[int]) -> list[ParamSpec]:
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
        # A table in a bucket of its own can send its gradient as rows.
        called_so = len(variable.shape) > 1 and _TABLE.search(path.split("/")[-1].lower())
        group = name if index in tables or called_so else 0
        specs.append(ParamSpec(name, tuple(variable.shape), dtype, group))
    return specs
