"""Whether ranks read the same batches: `fit` compares, after every epoch, what went by.

A dataset that is watched digests its batches as they pass, in the threads that read it. Ranks that
share batches must have read the same ones, in the same order, in every epoch: a shuffle without a
seed gives another order on each rank, perhaps after a first batch that was the same.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.fit import batches

# Batches that one rank may have read ahead of another: more than tf.data prefetches.
_KEPT = 1024
HINT = "shuffle(..., seed=1), or shuffle(...) after the same tf.random.set_seed"


class Watch:
    """The running digests of the batches that a dataset has read last."""

    def __init__(self) -> None:
        self._digests = tf.Variable(tf.zeros([_KEPT], tf.int64), trainable=False)
        self._count = tf.Variable(0, dtype=tf.int64, trainable=False)

    def on(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same dataset, watched. A new iteration starts with a new digest."""

        def note(before: Any, batch: Any) -> Any:
            found = batches.sampled_digest(batch, before)
            place = (self._count.assign_add(1) - 1) % _KEPT
            self._digests.scatter_nd_update([[place]], [found])
            return found, batch

        watched = dataset.scan(tf.constant(0, tf.int64), note)
        _watches[watched] = self
        return watched

    def position(self) -> int:
        """How many batches have been read."""
        return int(self._count)

    def seen(self, since: int = 0) -> list[int]:
        """The digests of the batches that were read after a position, the newest last."""
        count, digests = self.position(), self._digests.numpy().tolist()
        return [digests[i % _KEPT] for i in range(max(since, count - _KEPT), count)]


_watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


def watch_of(data: Any) -> Watch | None:
    """The watch on `data`, or on what it was made from by repeat, prefetch and the like."""
    if not isinstance(data, tf.data.Dataset):
        return None
    found = (watch_of(d) for d in compat.dataset_inputs(data))
    return _watches.get(data) or next((f for f in found if f is not None), None)
