"""Broadcast variables, so that all ranks start with the same values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from zerohvd.communication.collectives import Collectives
from zerohvd.keras.params import buffers
from zerohvd.keras.params.pieces import shard_of, tf_variable
from zerohvd.layout import ParamSpec, build_layout


def broadcast_variables(variables: Iterable[Any], collectives: Collectives, root: int = 0) -> None:
    """Give every rank the values of rank `root`, a bucket at a time; eager only.

    Sharded variables (stage 3) are left alone: every rank has a part of its own.
    """
    if collectives.size == 1:
        return
    natives = [tf_variable(v) for v in variables if shard_of(v) is None]
    specs = [
        ParamSpec(str(i), tuple(v.shape), v.dtype.base_dtype.name) for i, v in enumerate(natives)
    ]
    layout = build_layout(specs, 1)
    assembly = buffers.Assembly(layout, natives)
    for bucket in layout.buckets:
        flats = {s.param: tf.reshape(natives[s.param], [-1]) for s in bucket.slots}
        packed = buffers.pack(bucket, flats, bucket.dtype)
        name = f"zero/broadcast/b{bucket.index}"
        assembly.add(bucket, collectives.broadcast(packed, root, name=name))
