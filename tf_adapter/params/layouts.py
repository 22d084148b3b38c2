"""The layout of a Keras model's variables."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from zerohvd.config import MIB, ZeroConfig
from zerohvd.keras.params.pieces import tf_variable, variable_path
from zerohvd.layout import Layout, ParamSpec, build_layout

# glibc returns larger blocks to the system when they are freed: every step would take a page fault
# per page. A collective on 64 MiB was measured six times slower than four on 16 MiB.
_CHUNK_BYTES = 32 * MIB
_NO_CHUNKS = 1 << 62
# Names of variables whose gradients are tf.IndexedSlices; `build` sees variables, not gradients.
_TABLE = re.compile("embed|table")


def lay_out(
    variables: Sequence[Any],
    partition: str,
    config: ZeroConfig,
    size: int,
    tables: Collection[int],
) -> Layout:
    """The layout for `size` ranks; for one rank at stage 0, where nothing is sharded.

    `partition` is "flat" or "parameter", `tables` are the variables whose gradients are known to be
    tf.IndexedSlices.
    """
    sharded = config.stage > 0
    specs = _specs(variables, tables)
    chunk = max(_CHUNK_BYTES, config.bucket_bytes)
    # Sparse rows are sent for a whole table.
    large_table = any(s.group and s.nbytes > chunk for s in specs)
    whole = partition == "parameter" or not sharded or size == 1 or large_table
    return build_layout(
        specs,
        size if sharded else 1,
        bucket_bytes=config.bucket_bytes,
        partition=partition,
        chunk_bytes=_NO_CHUNKS if whole else chunk,
    )


def _specs(variables: Sequence[Any], tables: Collection[int]) -> list[ParamSpec]:
    """Unique names, shapes and dtypes of the variables.

    An embedding table (`tables`: known to be one) gets a bucket of its own: only then can its
    gradient be sent as rows.
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
