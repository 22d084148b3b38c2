"""Before ranks work together, they compare what each is about to do.

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

from zerohvd.errors import DisagreementError
from zerohvd.keras.optimizer.step import ShardedStep

SAVE, LOAD, FIT, FIT_COUNTED = 1, 2, 3, 4
_DOINGS = {
    SAVE: "zero.save()",
    LOAD: "zero.load()",
    FIT: "model.fit() on data that counts no samples",
    FIT_COUNTED: "model.fit() on a part from zero.shard_dataset",
}
_TOGETHER = (
    "All ranks make these calls together, and fit the same kind of data: do not put one behind "
    "`if hvd.rank() == 0`"
)
# What Horovod says when ranks do different things under one name.
_REFUSED = re.compile(r"Mismatched (data types|operations): One rank")


def meet(step: ShardedStep, doing: int) -> None:
    """Return when all ranks have come to the same call; raises on those that came to another.

    Args:
        step: Of the optimizer that all ranks train with.
        doing: SAVE, LOAD, or what the ranks are about to fit.
    """
    wire = step.wire
    if wire.size == 1 or not step.layout.buckets:
        return
    how = wire.options(_first_operation(step))

    @tf.function(autograph=False)
    def compare(said: Any) -> Any:  # in a graph, or it would have no name of its own
        return hvd.allgather(said, **how)

    said = tf.constant([doing], tf.int64)
    try:
        # Traced by hand: TensorFlow warns of functions that are traced again and again.
        heard = compare.get_concrete_function(said)(said).numpy().tolist()
    except Exception as error:
        if not _REFUSED.search(str(error)):
            raise
        raise DisagreementError(
            f"rank {wire.rank} called {_DOINGS[doing]} while another rank trains. {_TOGETHER}"
        ) from error
    # Every rank hears the same, so all of them take the same branch.
    if len(set(heard)) > 1:
        calls = ", ".join(f"rank {rank} {_DOINGS[call]}" for rank, call in enumerate(heard))
        raise DisagreementError(f"the ranks called different things: {calls}. {_TOGETHER}")


def _first_operation(step: ShardedStep) -> str:
    """The name of that which every step begins with, unless the first bucket is a sparse table."""
    wire, bucket = step.wire, step.layout.buckets[0]
    if step.local_sums and step.weighted:
        return "HorovodAllreduce" if step.eager else step.weight_name
    lengths = {span.length for span in bucket.spans()}
    narrow = tf.as_dtype(step.config.reduce_dtype or bucket.dtype).size == 2
    whole = step.layout.size == 1
    native = hvd.nccl_built() and not narrow and len(lengths) == 1
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
    """Training inside it says what it means when another rank is at `meet`."""
    try:
        yield
    except Exception as error:
        if not _REFUSED.search(str(error)):
            raise
        raise DisagreementError(
            f"rank {hvd.rank()} trains while another rank called zero.save(), zero.load() or "
            f"model.fit(). {_TOGETHER}"
        ) from error
