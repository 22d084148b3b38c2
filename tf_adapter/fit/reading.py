"""What ranks read in `fit`: parts of the same batches, or each its own data.

Ranks that share batches by `shard_dataset` are compared after every epoch. Ranks that share none
are compared once: if all were given the same data, each does the work of one, and rank 0 says so.
"""

from __future__ import annotations

import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from zerohvd.communication.agreement import out_of_step
from zerohvd.communication.collectives import Collectives
from zerohvd.errors import DisagreementError
from zerohvd.keras.fit import batches, order
from zerohvd.keras.fit.callback_list import with_callbacks
from zerohvd.keras.optimizer.distributed import optimizer_of, ranks_of

_ROWS = 8  # of arrays, at either end
_compared: weakref.WeakSet[Any] = weakref.WeakSet()  # models, once is enough

_ARRAYS = (
    "all ranks were given the same arrays, so each of them trains on everything and {size} ranks "
    "do the work of one. Give each rank its part of every batch: model.fit(zero.shard_dataset("
    "tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(128)), ...)"
)
_STREAMS = (
    "all ranks were given the same data, so each of them trains on everything and {size} ranks do "
    "the work of one. Give each rank its part of every batch: model.fit(zero.shard_dataset("
    "dataset), ...); or its own samples: dataset.shard(hvd.size(), hvd.rank()) before batch()"
)


def run(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `fit`, and compare what ranks read."""
    ranks = None if optimizer_of(model) is None else ranks_of(model)
    if ranks is None or ranks.size == 1:
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs)
    shared, known = order.watch_of(given.arguments.get("x")) is not None, model in _compared
    source = None if shared or known else _Source(given.arguments)
    said = [shared, known, source and source.digest()]
    heard = ranks.allgather_object(said, name="zero/fit/data")
    # Every rank hears the same, so all of them compare, or none does.
    digests = [digest for _, _, digest in heard]
    if all(shared for shared, _, _ in heard):
        # First, so that nothing is saved of an epoch that went wrong.
        compare: list[Any] = [_SameBatches(ranks, given.arguments)]
    elif any(shared or known for shared, known, _ in heard):
        return original(*given.args, **given.kwargs)
    else:
        _compared.add(model)
        _warn_if_same(digests, _ARRAYS, ranks)
        compare = [_FirstBatches(ranks, source)] if None in digests else []
    with with_callbacks(given.arguments, compare):
        return original(*given.args, **given.kwargs)


class _SameBatches(keras.callbacks.Callback):
    """Raises after an epoch in which ranks have read parts of different batches.

    What was read before does not count: a rank that has read a shuffled dataset once more has seen
    the batches of this epoch already, and is a shuffle ahead.
    """

    def __init__(self, ranks: Collectives, given: dict[str, Any]) -> None:
        super().__init__()
        found = [order.watch_of(given.get(name)) for name in ("x", "validation_data")]
        self._ranks, self._watches = ranks, [w for w in found if w is not None]
        self._starts = [w.position() for w in self._watches]
        # Otherwise Keras reads on where the last epoch ended, and ranks have read ahead by then.
        self._begins_anew = given.get("steps_per_epoch") is None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._begins_anew:
            self._starts[0] = self._watches[0].position()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for index, (watch, start) in enumerate(zip(self._watches, self._starts, strict=True)):
            odd = out_of_step(self._ranks, watch.seen(start), name=f"zero/fit/order{index}")
            if odd:
                raise DisagreementError(
                    f"in epoch {epoch + 1} ranks {odd} have read other batches than rank 0, so "
                    "some samples were trained on twice and others never. Give the dataset the "
                    f"same order on all ranks, such as {order.HINT}, and read it equally often on "
                    "all of them; or pass zero.shard_dataset(..., check=False) if that is meant."
                )


class _FirstBatches(keras.callbacks.Callback):
    """Compares the first batches of datasets and generators, which are known after an epoch."""

    def __init__(self, ranks: Collectives, source: _Source | None) -> None:
        super().__init__()
        self._ranks, self._source = ranks, source

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._source is None:
            return
        source, self._source = self._source, None
        heard = self._ranks.allgather_object(source.first_batch(), name="zero/fit/first_batch")
        _warn_if_same(heard, _STREAMS, self._ranks)


def _warn_if_same(digests: Sequence[Any], words: str, ranks: Collectives) -> None:
    if None not in digests and len(set(digests)) == 1 and ranks.rank == 0:
        warnings.warn(words.format(size=ranks.size), stacklevel=2)


class _Source:
    """The data of a `fit` that shares no batches; watched, if it is a stream of batches.

    `given` are the arguments of `fit`, in which `x` is replaced by the watched stream.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._watch: order.Watch | None = None
        self._first: str | None = None
        x = given.get("x")
        if isinstance(x, tf.data.Dataset):
            self._watch = order.Watch()
            given["x"] = self._watch.on(x)
        elif isinstance(x, types.GeneratorType):
            given["x"] = self._watched(x)

    def _watched(self, generator: Iterator[Any]) -> Iterator[Any]:
        for batch in generator:
            self._first = self._first or batches.digest(batch)
            yield batch

    def digest(self) -> str | None:
        """Of arrays; None where batches are only known when they are read. Arrays with
        steps_per_epoch are read in part, which is a way to share them."""
        given = [self._given.get(name) for name in ("x", "y", "sample_weight")]
        found = tf.nest.flatten([g for g in given if g is not None])
        partly = self._given.get("steps_per_epoch") is not None
        if not found or partly or not all(map(_is_array, found)):
            return None
        ends = [(np.asarray(a[:_ROWS]), np.asarray(a[-_ROWS:]), len(a)) for a in found]
        return batches.digest(ends)

    def first_batch(self) -> str | None:
        if self._watch is None:
            return self._first
        # A few: small batches of shuffled data may begin alike by chance.
        return str(self._watch.seen()[:4]) if self._watch.position() else None


def _is_array(x: Any) -> bool:
    return (isinstance(x, np.ndarray) or tf.is_tensor(x)) and len(x.shape) > 0
