"""How many steps `fit` will take: ranks that take fewer leave the others waiting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from zerohvd.errors import DisagreementError

_KERAS_BATCH = 32  # what `fit` takes for arrays without batch_size
_UNKNOWN = -1


class Planned(NamedTuple):
    """What one rank's `fit` will do; -1: it cannot know."""

    batches: int = _UNKNOWN
    epochs: int = _UNKNOWN


def _instead(call: str) -> str:
    if call == "model.fit()":
        return "fit(zero.shard_dataset(dataset), ...) or by the same steps_per_epoch and epochs"
    return "data of the same length on all ranks, or the same steps="


def planned(given: Mapping[str, Any]) -> Planned:
    """What `fit` will do with these arguments."""
    epochs = (given.get("epochs") or 1) - (given.get("initial_epoch") or 0)
    return Planned(_batches(given), max(0, epochs))


def _batches(given: Mapping[str, Any]) -> int:
    """Batches per epoch."""
    x, steps = given.get("x"), given.get("steps_per_epoch", given.get("steps"))
    if steps is not None:
        return int(steps)
    if isinstance(x, tf.data.Dataset):
        return max(_UNKNOWN, int(x.cardinality()))  # unknown and infinite are negative
    if isinstance(x, keras.utils.PyDataset):
        return _UNKNOWN if x.num_batches is None else int(x.num_batches)
    arrays = tf.nest.flatten(x)
    shape = getattr(arrays[0], "shape", None) if arrays else None
    if not shape or shape[0] is None:
        return _UNKNOWN
    rows = math.floor(shape[0] * (1.0 - (given.get("validation_split") or 0.0)))
    return math.ceil(rows / (given.get("batch_size") or _KERAS_BATCH))


def different(plans: Sequence[Planned], call: str) -> DisagreementError | None:
    """The error for ranks that will take these numbers of steps; None if they agree."""
    for number, what in enumerate(("batches per epoch", "epochs")):
        known = {rank: p[number] for rank, p in enumerate(plans) if p[number] != _UNKNOWN}
        if len(set(known.values())) > 1:
            said = ", ".join(f"{count} on rank {rank}" for rank, count in known.items())
            return DisagreementError(
                f"{call} would run a different number of {what}: {said}. The ranks that end "
                "first would leave the others waiting: give all of them as many, by "
                f"{_instead(call)}"
            )
    return None
