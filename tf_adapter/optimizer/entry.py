"""The rendezvous of ranks that train with Keras, at no cost for the training.

A rank that saves while another one trains would wait for it for ever, each in a collective of its
own. So a call begins with a small one that has the name of the first operation of a step, but is of
another kind: Horovod refuses that on both ranks at once, and training pays nothing for it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from zerohvd import limits
from zerohvd.communication.rendezvous import Call, another_trains, different_calls, others_called
from zerohvd.errors import DisagreementError
from zerohvd.keras.communication.wire import join
from zerohvd.keras.optimizer.step import ShardedStep
from zerohvd.keras.params.pieces import shard_of

# What Horovod says when ranks do different things under one name.
_REFUSED = re.compile(r"Mismatched (data types|operations): One rank")
# How TensorFlow names the collective that has failed: in a graph, and outside.
_FAILED = re.compile(r"(?:\{\{node [^}]*?|\] name: )(zero(?:\.\d+)?\.[^}/\s]+)")
_NUMBERS = 2


def meet(step: ShardedStep, call: Call, numbers: Sequence[int] = ()) -> list[list[int]]:
    """Return when all ranks have come to the same call; raises on those that came to another.

    Args:
        step: Of the optimizer that all ranks train with.
        call: What this rank is about to do.
        numbers: What the ranks want to know of each other; at most two.

    Returns:
        The numbers of all ranks, in rank order.
    """
    wire = step.wire
    if wire.size == 1 or not step.layout.buckets:
        return [list(numbers)]
    how = wire.options(_first_operation(step))

    @tf.function(autograph=False)
    def compare(said: Any) -> Any:  # in a graph, or it would have no name of its own
        return hvd.allgather(said, **how)

    # Of one length in every call: ranks that make different ones meet here.
    said = tf.constant([[int(call), *numbers, *[0] * (_NUMBERS - len(numbers))]], tf.int64)
    said_as = call.said.partition(" on ")[0].partition(" at ")[0]
    with limits.during(said_as), explained(another_trains(wire.rank, call)):
        # Traced by hand: TensorFlow warns of functions that are traced again and again.
        heard = compare.get_concrete_function(said)(said).numpy().tolist()
    # Every rank hears the same, so all of them take the same branch.
    difference = different_calls([row[0] for row in heard])
    if difference is not None:
        raise difference
    return [row[1 : 1 + len(numbers)] for row in heard]


def meet_first(process_set: Any, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of all ranks, whose optimizers are not built yet."""
    ranks = join(process_set)
    with limits.during("model.fit()"):
        said = ranks.from_numpy(np.array([numbers], np.int64))
        heard: list[list[int]] = ranks.to_numpy(ranks.allgather(said, name="zero/fit")).tolist()
    return heard


def _first_operation(step: ShardedStep) -> str:
    """The name of every step's first collective, unless the first bucket is a sparse table."""
    wire, bucket = step.wire, step.layout.buckets[0]
    shards = [s for s in map(shard_of, step.variables) if s is not None]
    if shards and shards[0].home.first_operation:
        # At stage 3 a step begins with its forward pass.
        kind = shards[0].home.first_operation
        return f"Horovod{kind.kind}" if step.eager else str(kind.name)
    if step.begins_with is not None:
        return "HorovodAllreduce" if step.eager else step.begins_with
    if step.reducer.local_sums and step.reducer.weighted:
        return "HorovodAllreduce" if step.eager else step.reducer.weight_name
    narrow = tf.as_dtype(step.config.reduce_dtype or bucket.dtype).size == 2
    whole = step.layout.size == 1
    packed = wire.packing is not None
    native = hvd.nccl_built() and not narrow and not packed and len(set(bucket.lengths)) == 1
    if step.eager:
        # TensorFlow calls an operation outside of graphs by its kind.
        kind = "Allreduce" if whole and not narrow else "Reducescatter" if native else "Alltoall"
        return f"Horovod{kind}"
    name = step.name_of(bucket, "allreduce" if whole else "reducescatter")
    if whole and not narrow:
        return name
    name = f"{name}/reducescatter" if whole else name
    return name if native or packed or wire.size == 2 else f"{name}/0"


@contextlib.contextmanager
def explained(refused: DisagreementError | None = None) -> Iterator[None]:
    """Turn Horovod's errors into ours: another rank has ended, or did not come.

    Args:
        refused: The error for a rank that meets one in another call; unless given, this rank
            trains, and the other one is at `meet`.
    """
    try:
        yield
    except Exception as error:
        if _REFUSED.search(str(error)):
            raise refused or others_called(hvd.rank()) from error
        failed = _FAILED.search(str(error))
        what = limits.in_words(failed[1]) if failed else "a collective of all ranks"
        explanation = limits.explain(error, hvd.rank(), range(hvd.size()), what)
        if explanation is None:
            raise
        raise explanation from error
