"""The same values on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from zerohvd.communication.collectives import Collectives
from zerohvd.keras.params.pieces import tf_variable
from zerohvd.layout import ParamSpec, build_layout


def broadcast_variables(variables: Iterable[Any], collectives: Collectives, root: int = 0) -> None:
    """Give every rank the values of rank `root`, a bucket at a time; eager only."""
    if collectives.size == 1:
        return
    natives = [tf_variable(v) for v in variables]
    specs = [
        ParamSpec(str(i), tuple(v.shape), v.dtype.base_dtype.name) for i, v in enumerate(natives)
    ]
    layout = build_layout(specs, 1)
    values: dict[int, list[Any]] = {}
    for bucket in layout.buckets:
        parts = [
            tf.reshape(natives[s.param], [-1])[s.param_start : s.param_start + s.length]
            for s in bucket.slots
        ]
        sent = collectives.broadcast(
            tf.concat(parts, 0), root, name=f"zero/broadcast/b{bucket.index}"
        )
        at = 0
        for slot in bucket.slots:
            values.setdefault(slot.param, []).append(sent[at : at + slot.length])
            at += slot.length
            if len(values[slot.param]) == len(layout.slots_of[slot.param]):
                flat = tf.concat(values.pop(slot.param), 0)
                native = natives[slot.param]
                native.assign(tf.reshape(flat, native.shape))
