"""Metrics over the samples of all ranks: the sum of the ranks' metric states gives one result.

A Keras metric keeps sums in its variables (`total` and `count`, true positives, a confusion
matrix) and says with each how it is put together from several replicas (`aggregation`, "sum"
unless the metric says otherwise). An average of the results would be wrong for most metrics.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import keras
import numpy as np

from zerohvd.communication.collectives import Collectives

Array = np.ndarray[Any, Any]


class Snapshot(NamedTuple):
    """A model's metrics at one moment on this rank."""

    state: list[Array]
    results: dict[str, Any]
    samples: float  # in the loss


def snapshot(model: Any) -> Snapshot:
    state = [v.numpy() for v in model.metrics_variables]
    losses = [m for m in model.metrics if isinstance(m, keras.metrics.Mean) and m.name == "loss"]
    samples = float(losses[0].count) if losses else 0.0
    return Snapshot(state, _results(model), samples)


def together(
    model: Any, here: Snapshot, logs: dict[str, Any], ranks: Collectives, name: str
) -> dict[str, float]:
    """What `logs` would say if one process had seen the samples of all ranks.

    A number that no metric of the model's accounts for, such as a train_step of one's own may
    return, is averaged, by the samples of the loss where they are counted.

    Args:
        model: Its metrics have been built.
        here: Its metrics when `logs` were made.
        logs: Numbers by name.
        ranks: All of them call this.
        name: Of the operations.
    """
    # In the order of the metrics: Keras numbers names, and not on all ranks alike.
    names = [n for n in here.results if n in logs]
    names += sorted(n for n, v in logs.items() if n not in here.results and np.ndim(v) == 0)
    _compare(names, here, ranks, name)
    mine = np.array([float(logs[n]) for n in names], np.float64)
    known = np.array([_is_result(here, n, v) for n, v in zip(names, mine, strict=True)], np.float64)
    # A mean of no samples may be NaN, and must not spoil those of other ranks.
    counted = mine * here.samples if here.samples > 0 else np.zeros_like(mine)
    variables = model.metrics_variables
    state = [_share(v, x, ranks) for v, x in zip(variables, here.state, strict=True)]
    parts = [known, mine, counted, np.array([here.samples]), *state]
    sums = _add_up(parts, ranks, name)
    everywhere, plain, total, samples = sums[:4]
    mean = total / samples if samples[0] > 0 else plain / ranks.size
    joint = _results_of(model, here.state, sums[4:])
    return {
        n: float(joint[n]) if everywhere[i] == ranks.size else float(mean[i])
        for i, n in enumerate(names)
    }


def _results(model: Any) -> dict[str, Any]:
    return {k: v for k, v in model.get_metrics_result().items() if np.ndim(v) == 0}


def _is_result(here: Snapshot, name: str, value: float) -> bool:
    if name not in here.results:
        return False
    return bool(np.isclose(float(here.results[name]), value, rtol=1e-6, atol=0, equal_nan=True))


def _share(variable: Any, value: Array, ranks: Collectives) -> Array:
    """What this rank adds to the sum."""
    how = getattr(variable, "aggregation", "sum")
    value = value.astype(np.float64)
    if how == "only_first_replica":
        return value if ranks.rank == 0 else np.zeros_like(value)
    return value / ranks.size if how == "mean" else value


def _compare(names: list[str], here: Snapshot, ranks: Collectives, name: str) -> None:
    """Raise on all ranks if they have different metrics; the sums would make no sense."""
    plain = [re.sub(r"_\d+$", "", n) for n in names]
    mine = (plain, [(x.shape, str(x.dtype)) for x in here.state])
    seen = ranks.allgather_object(mine, name=f"{name}/names")
    differ = [r for r, s in enumerate(seen) if s != seen[0]]
    if differ:
        raise ValueError(
            f"MetricAverage: rank 0 has the metrics {seen[0][0]}, but ranks {differ} have others, "
            f"rank {differ[0]} {seen[differ[0]][0]}. Compile the same metrics on all ranks, and "
            "validate on all of them or on none."
        )


def _add_up(parts: list[Array], ranks: Collectives, name: str) -> list[Array]:
    flat = np.concatenate([np.ravel(p) for p in parts])
    summed = ranks.to_numpy(ranks.allreduce(ranks.from_numpy(flat), name=name))
    ends = np.cumsum([p.size for p in parts])
    cut = np.split(summed, ends[:-1])
    return [c.reshape(p.shape) for c, p in zip(cut, parts, strict=True)]


def _results_of(model: Any, own: list[Array], joint: list[Array]) -> dict[str, Any]:
    """The metrics' results with the state `joint`; afterwards their state is what it was."""
    variables = model.metrics_variables
    now = [v.numpy() for v in variables]
    try:
        for variable, value, like in zip(variables, joint, own, strict=True):
            variable.assign(value.astype(like.dtype))
        return _results(model)
    finally:
        for variable, value in zip(variables, now, strict=True):
            variable.assign(value)
