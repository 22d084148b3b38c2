"""Metrics over the samples of all ranks: the sum of the ranks' metric states gives one result.

A metric keeps sums (a total and a count, true positives, a confusion matrix), and an average of
the ranks' results would be wrong for most metrics. A state that is no sum says how it is combined.
How a framework computes a result from a state is the adapter's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zerohvd.communication.collectives import Collectives

Array = np.ndarray[Any, Any]

# Of the ranks' states, stacked in rank order: the last rank has the last samples of a batch.
_COMBINE: dict[str, Callable[[Array], Any]] = {
    "max": lambda states: states.max(axis=0),
    "min": lambda states: states.min(axis=0),
    "product": lambda states: states.prod(axis=0),
    "last": lambda states: states[-1],
}
AGGREGATIONS = ("sum", "mean", *_COMBINE, "only_first_replica")


class Snapshot(NamedTuple):
    """A model's metrics at one moment on this rank."""

    state: list[Array]
    aggregation: list[str]  # of each state: one of AGGREGATIONS
    results: dict[str, Array]  # numbers, or one per class or threshold
    samples: float  # in the loss; 0: they are not counted


class Joint(NamedTuple):
    """The same over all ranks."""

    state: list[Array]
    means: dict[str, Any]  # of the numbers and arrays in the logs
    metrics: set[str]  # the numbers in the logs that are results of metrics, on all ranks


def add_up(here: Snapshot, logs: Mapping[str, Any], ranks: Collectives, name: str) -> Joint:
    """Add up or combine the states of all ranks, which must all call this.

    Means are weighted by the samples where the loss counts them.
    """
    # In the order of the metrics: a framework may number names, and not on all ranks alike.
    names = [n for n in here.results if n in logs]
    names += sorted(n for n, v in logs.items() if n not in here.results and np.ndim(v) == 0)
    _compare(names, here, ranks, name)
    values = [np.asarray(logs[n], np.float64) for n in names]
    # Logs of these names alone are results: one that is a variable has changed since.
    same = here.results.keys() == logs.keys()
    known = [same or _is_result(here, n, v) for n, v in zip(names, values, strict=True)]
    mine = np.concatenate([np.ravel(v) for v in values]) if values else np.zeros(0)
    # A mean of no samples may be NaN, and must not spoil those of other ranks.
    counted = mine * here.samples if here.samples > 0 else np.zeros_like(mine)
    state = [_share(*s, ranks) for s in zip(here.state, here.aggregation, strict=True)]
    parts = [np.array(known, np.float64), mine, counted, np.array([here.samples]), *state]
    everywhere, plain, total, samples, *joint = _sum(parts, ranks, name)
    joint = _combined(here, joint, ranks, name)
    means = np.split(
        total / samples if samples[0] > 0 else plain / ranks.size,
        np.cumsum([v.size for v in values])[:-1],
    )
    return Joint(
        [x.astype(like.dtype) for x, like in zip(joint, here.state, strict=True)],
        {
            n: mean.reshape(v.shape) if v.ndim else float(mean[0])
            for n, mean, v in zip(names, means, values, strict=False)
        },
        {n for n, count in zip(names, everywhere, strict=True) if count == ranks.size},
    )


def _is_result(here: Snapshot, name: str, value: Array) -> bool:
    result = here.results.get(name)
    if result is None or np.shape(result) != value.shape:
        return False
    return bool(np.allclose(result, value, rtol=1e-6, atol=0, equal_nan=True))


def _share(value: Array, aggregation: str, ranks: Collectives) -> Array:
    """What this rank adds to the sum."""
    value = value.astype(np.float64)
    if aggregation == "only_first_replica":
        return value if ranks.rank == 0 else np.zeros_like(value)
    if aggregation in _COMBINE:
        return np.zeros_like(value)
    return value / ranks.size if aggregation == "mean" else value


def _combined(here: Snapshot, sums: list[Array], ranks: Collectives, name: str) -> list[Array]:
    """The states of all ranks: sums, but for those that are combined in another way."""
    chosen = [i for i, how in enumerate(here.aggregation) if how in _COMBINE]
    if not chosen:  # on all ranks alike, which have compared it
        return sums
    mine = np.concatenate([np.ravel(here.state[i]).astype(np.float64) for i in chosen])
    seen = ranks.to_numpy(ranks.allgather(ranks.from_numpy(mine[None]), name=f"{name}/combined"))
    ends = np.cumsum([here.state[i].size for i in chosen])[:-1]
    joint = list(sums)
    for i, states in zip(chosen, np.split(seen, ends, axis=1), strict=True):
        joint[i] = _COMBINE[here.aggregation[i]](states).reshape(here.state[i].shape)
    return joint


def _compare(names: Sequence[str], here: Snapshot, ranks: Collectives, name: str) -> None:
    """Raise on all ranks if they have different metrics; the sums would make no sense."""
    plain = [re.sub(r"_\d+$", "", n) for n in names]
    shapes = [(list(x.shape), str(x.dtype)) for x in here.state]
    mine = (plain, shapes, here.aggregation)
    seen = ranks.allgather_object(mine, name=f"{name}/names")
    differ = [r for r, s in enumerate(seen) if s != seen[0]]
    if differ:
        raise ValueError(
            f"MetricAverage: rank 0 has the metrics {seen[0][0]}, but ranks {differ} have others, "
            f"rank {differ[0]} {seen[differ[0]][0]}. Compile the same metrics on all ranks, and "
            "validate on all of them or on none."
        )


def _sum(parts: Sequence[Array], ranks: Collectives, name: str) -> list[Array]:
    flat = np.concatenate([np.ravel(p) for p in parts])
    summed = ranks.to_numpy(ranks.allreduce(ranks.from_numpy(flat), name=name))
    cut = np.split(summed, np.cumsum([p.size for p in parts])[:-1])
    return [c.reshape(p.shape) for c, p in zip(cut, parts, strict=True)]
