"""A step that is traced into a graph: how buckets and updates are cut, and how many are in flight.

The runtime of a graph starts whatever it can at once; the graph itself must bound the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerohvd.config import MIB, ZeroConfig
from zerohvd.layout import Layout, ParamSpec, Piece, build_layout, round_up

# glibc returns larger blocks to the system when they are freed: every step would take a page fault
# per page. A collective on 64 MiB was measured six times slower than four on 16 MiB.
_CHUNK_BYTES = 32 * MIB
_NO_CHUNKS = 1 << 62

# An update allocates up to eight tensors of the size of what it updates. A rank's shard is updated
# in parts of 1/8 of a bucket, so that these temporaries take one bucket, and fit into the caches.
# Below the least size, the overhead per operation would exceed the operation.
_PARTS = 8
_LEAST_PART_BYTES = 64 * 1024

# At stage 3 a rank never holds a whole variable, and the operations of many small updates take more
# memory than they save: tens of KiB each. A table may be of any size: tracing thousands of updates
# would take minutes.
_PARTS_OF_UNITS = 2
_MOST_PARTS = 64

# A graph would hold copies of all gradients in flight. At most so many buckets are in flight at a
# time, and only one until the gradients of so many buckets have been freed, which makes room.
IN_FLIGHT = 2
ROOM = 3


def lay_out(specs: Sequence[ParamSpec], partition: str, config: ZeroConfig, size: int) -> Layout:
    """The layout for `size` ranks; for one rank at stage 0, where nothing is sharded.

    Args:
        specs: A group of its own marks an embedding table, whose gradient may be sent as rows.
        partition: "flat" or "parameter".
        config: The optimizer's.
        size: The number of ranks.
    """
    sharded = config.stage > 0
    chunk = max(_CHUNK_BYTES, config.bucket_bytes)
    # Sparse rows are sent for a whole table.
    large_table = any(s.group and s.nbytes > chunk for s in specs)
    # At stage 3 a variable is gathered when its unit is, at once: in chunks it would be copied.
    gathered = config.stage == 3
    whole = partition == "parameter" or not sharded or size == 1 or large_table or gathered
    return build_layout(
        specs,
        size if sharded else 1,
        bucket_bytes=config.bucket_bytes,
        partition=partition,
        chunk_bytes=_NO_CHUNKS if whole else chunk,
    )


def updated_pieces(layout: Layout, rank: int, config: ZeroConfig) -> list[Piece]:
    """What `rank` owns, in the parts in which it is updated, in the layout's order."""
    shared = layout.size > 1
    owned = list(layout.pieces(rank if shared else 0))
    if not shared or layout.partition != "flat":
        return owned
    # In float32. They start at multiples of 64 bytes, where slices need no copy.
    count = _PARTS_OF_UNITS if config.stage == 3 else _PARTS
    length = max(_LEAST_PART_BYTES, config.bucket_bytes // count) // 64 * 16
    return [
        part
        for piece in owned
        for part in piece.parts(_part_length(piece, length, layout.params[piece.param], config))
    ]


def _part_length(piece: Piece, length: int, spec: ParamSpec, config: ZeroConfig) -> int:
    if config.stage == 3:
        length = max(length, -(-piece.param_span.length // _MOST_PARTS))
    return round_up(length, math.lcm(16, spec.multiple))


def buckets_alone(layout: Layout) -> int:
    """How many buckets run one after the other, until enough gradients have been freed."""
    sizes = [bucket.nbytes for bucket in layout.buckets]
    freed = 0
    for index, size in enumerate(sizes):
        if freed >= ROOM * max(sizes):
            return index
        freed += size
    return len(sizes)
