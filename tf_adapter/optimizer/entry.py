"""The rendezvous of ranks that train with Keras, at no cost for the training.

A rank that saves while another one trains would wait for it for ever, each in a collective of its
own. So a call begins with a small one that has the name of the first operation of a step, but is of
another kind: Horovod refuses that on both ranks at once, and training pays nothing for it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from zerohvd.communication.rendezvous import Call, another_trains, different_calls, others_called
from zerohvd.keras.optimizer.step import ShardedStep

# What Horovod says when ranks do different things under one name.
_REFUSED = re.compile(r"Mismatched (data types|operations): One rank")


def meet(step: ShardedStep, call: Call) -> None:
    """Return when all ranks have come to the same call; raises on those that came to another.

    Args:
        step: Of the optimizer that all ranks train with.
        call: What this rank is about to do.
    """
    wire = step.wire
    if wire.size == 1 or not step.layout.buckets:
        return
    how = wire.options(_first_operation(step))

    @tf.function(autograph=False)
    def compare(said: Any) -> Any:  # in a graph, or it would have no name of its own
        return hvd.allgather(said, **how)

    said = tf.constant([int(call)], tf.int64)
    try:
        # Traced by hand: TensorFlow warns of functions that are traced again and again.
        heard = compare.get_concrete_function(said)(said).numpy().tolist()
    except Exception as error:
        if not _REFUSED.search(str(error)):
            raise
        raise another_trains(wire.rank, call) from error
    # Every rank hears the same, so all of them take the same branch.
    difference = different_calls(heard)
    if difference is not None:
        raise difference


def _first_operation(step: ShardedStep) -> str:
    """The name of every step's first collective, unless the first bucket is a sparse table."""
    wire, bucket = step.wire, step.layout.buckets[0]
    if step.begins_with is not None:
        return "HorovodAllreduce" if step.eager else step.begins_with
    if step.reducer.local_sums and step.reducer.weighted:
        return "HorovodAllreduce" if step.eager else step.reducer.weight_name
    narrow = tf.as_dtype(step.config.reduce_dtype or bucket.dtype).size == 2
    whole = step.layout.size == 1
    native = hvd.nccl_built() and not narrow and len(set(bucket.lengths)) == 1
    if step.eager:
        # TensorFlow calls an operation outside of graphs by its kind.
        kind = "Allreduce" if whole and not narrow else "Reducescatter" if native else "Alltoall"
        return f"Horovod{kind}"
    name = step.name_of(bucket, "allreduce" if whole else "reducescatter")
    if whole and not narrow:
        return name
    name = f"{name}/reducescatter" if whole else name
    return name if native or wire.size == 2 else f"{name}/0"


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn Horovod's error into ours, where this rank trains while another one is at `meet`."""
    try:
        yield
    except Exception as error:
        if not _REFUSED.search(str(error)):
            raise
        raise others_called(hvd.rank()) from error
