"""The layout of a Keras model's variables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from zerohvd.config import MIB, ZeroConfig
from zerohvd.keras.params.naming import param_specs
from zerohvd.layout import Layout, build_layout

# glibc returns larger blocks to the system when they are freed: every step would take a page fault
# per page. A collective on 64 MiB was measured six times slower than four on 16 MiB.
_CHUNK_BYTES = 32 * MIB
_NO_CHUNKS = 1 << 62


def lay_out(
    variables: Sequence[Any],
    partition: str,
    config: ZeroConfig,
    size: int,
    tables: Collection[int],
) -> Layout:
    """The layout for `size` ranks; for one rank at stage 0, where nothing is sharded.

    Args:
        variables: The model's.
        partition: "flat" or "parameter".
        config: Settings.
        size: How many ranks there are.
        tables: The variables whose gradients are known to be tf.IndexedSlices.
    """
    sharded = config.stage > 0
    specs = param_specs(variables, tables)
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
