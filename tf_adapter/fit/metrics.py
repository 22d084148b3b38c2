"""Keras metrics over the samples of all ranks.

Keras' own metrics keep sums. What a metric of the user's keeps nobody can know: its class says so
with `across_ranks`, or rank 0 names it in a warning.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from zerohvd.communication.collectives import Collectives
from zerohvd.communication.metrics import AGGREGATIONS, Snapshot, add_up
from zerohvd.keras import compat

_KINDS = tuple(a for a in AGGREGATIONS if a != "only_first_replica")
# The variables of metrics that subclasses feed by super().update_state(...).
_SUMS = {keras.metrics.Mean: {"total", "count"}, keras.metrics.Sum: {"total"}}
# Metrics whose function gave one number for a batch, when a step was traced.
_per_batch: weakref.WeakSet[Any] = weakref.WeakSet()
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def snapshot(model: Any) -> Snapshot:
    """The model's metrics now."""
    variables = model.metrics_variables
    losses = [m for m in model.metrics if isinstance(m, keras.metrics.Mean) and m.name == "loss"]
    how = {id(v): h for m in _leaves(model.metrics) for v, h in _aggregations(m)}
    return Snapshot(
        [v.numpy() for v in variables],
        [how.get(id(v), "sum") for v in variables],
        _results(model),
        float(losses[0].count) if losses else 0.0,
    )


def together(
    model: Any, here: Snapshot, logs: dict[str, Any], ranks: Collectives, name: str
) -> dict[str, Any]:
    """What `logs` would be if one process had seen the samples of all ranks, which all call this.

    `here` are the metrics when `logs` were made. A number that is no metric of the model, such as a
    custom train_step may return, is averaged.
    """
    _warn_of_unknown(model, ranks)
    joint = add_up(here, logs, ranks, name)
    variables = model.metrics_variables
    now = [v.numpy() for v in variables]
    try:
        _assign(variables, joint.state)
        results = _results(model)
    finally:
        _assign(variables, now)
    return {n: results[n] if n in joint.metrics else mean for n, mean in joint.means.items()}


def note_per_batch(metric: Any) -> None:
    """Remember that a metric was given one number for all samples of a batch."""
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        _per_batch.add(metric)


def _leaves(metrics: Any) -> Iterator[Any]:
    for metric in metrics:
        yield metric
        yield from _leaves(compat.metrics_in(metric))


def _aggregations(metric: Any) -> list[tuple[Any, str]]:
    """A metric's own variables, and how each is combined: as `across_ranks` of its class says, or
    as `aggregation` does, for which tf.distribute knows less."""
    said = getattr(metric, "across_ranks", None)
    own = compat.metric_variables(metric)
    names = [v.name for v in own]
    by_name: dict[str, Any] = said if isinstance(said, dict) else dict.fromkeys(names, said)
    if said is not None and not (set(by_name) <= set(names) and set(by_name.values()) <= {*_KINDS}):
        raise ValueError(
            f"across_ranks of the metric {metric.name!r} must be one of {_KINDS}, or say so for "
            f"each of its variables {names}, got {said!r}"
        )
    return [(v, str(by_name.get(v.name) or getattr(v, "aggregation", "sum"))) for v in own]


def _is_known(metric: Any) -> bool:
    """Whether the states are sums for certain, or the user has said what they are."""
    own = compat.metric_variables(metric)
    said = all(getattr(v, "aggregation", "sum") != "sum" for v in own)
    if said or getattr(metric, "across_ranks", None) is not None:
        return True
    updates = next(c for c in type(metric).__mro__ if "update_state" in vars(c))
    if updates.__module__.partition(".")[0] == "keras":
        return True
    names = {v.name for v in own}
    return any(isinstance(metric, cls) and names == made for cls, made in _SUMS.items())


def _warn_of_unknown(model: Any, ranks: Collectives) -> None:
    """Name, once, the metrics whose result may not be that of one process."""
    if ranks.size == 1:
        return
    for metric in _leaves(model.metrics):
        if metric in _told:
            continue
        what = None
        if metric in _per_batch or _is_over_samples(metric):
            what = _OVER_SAMPLES
        elif not _is_known(metric):
            what = _UNKNOWN
        if what is None:
            continue
        _told.add(metric)
        if ranks.rank == 0:
            names = ", ".join(repr(v.name) for v in compat.metric_variables(metric))
            kind = type(metric).__name__
            warnings.warn(what.format(name=metric.name, kind=kind, names=names), stacklevel=3)


_UNKNOWN = (
    "the metric {name!r} has an update_state of its own, and MetricAverage adds up its variables "
    "({names}) over the ranks, which is wrong unless they are sums over samples. Say in class "
    "{kind} what they are: across_ranks = 'sum', 'mean', 'max', 'min', 'product' or 'last', or for "
    "each variable across_ranks = {{'name': 'max', ...}}"
)
_OVER_SAMPLES = (
    "the metric {name!r} gives one number for all samples of a batch: of each rank's part of it, "
    "and MetricAverage takes the mean, which is right if that number is a mean over samples, and "
    "only then. Let its function return one value per sample, such as keras.ops.mean(..., axis=-1)"
)


def _is_over_samples(metric: Any) -> bool:
    """Whether one of Keras' metrics was asked to compare samples with each other."""
    axis = getattr(metric, "axis", None)
    return isinstance(metric, keras.metrics.MeanMetricWrapper) and axis in (0, (0,), [0])


def _results(model: Any) -> dict[str, Any]:
    """Numbers, and arrays of metrics that give one per class or threshold."""
    found = {k: np.asarray(v) for k, v in _flat(model.get_metrics_result()).items()}
    return {k: v if v.ndim else float(v) for k, v in found.items()}


def _flat(results: Mapping[str, Any]) -> dict[str, Any]:
    """One name per number, as in logs: a metric may have several results, by name."""
    named = [v if isinstance(v, dict) else {n: v} for n, v in results.items()]
    return {n: v for part in named for n, v in part.items()}


def _assign(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
