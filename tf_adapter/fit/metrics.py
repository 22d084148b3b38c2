"""Keras metrics over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from zerohvd.communication.collectives import Collectives
from zerohvd.communication.metrics import Snapshot, add_up


def snapshot(model: Any) -> Snapshot:
    """The model's metrics now; a variable says by `aggregation` how replicas are combined."""
    variables = model.metrics_variables
    losses = [m for m in model.metrics if isinstance(m, keras.metrics.Mean) and m.name == "loss"]
    return Snapshot(
        [v.numpy() for v in variables],
        [getattr(v, "aggregation", "sum") for v in variables],
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
    joint = add_up(here, logs, ranks, name)
    variables = model.metrics_variables
    now = [v.numpy() for v in variables]
    try:
        _assign(variables, joint.state)
        results = _results(model)
    finally:
        _assign(variables, now)
    return {n: results[n] if n in joint.metrics else mean for n, mean in joint.means.items()}


def _results(model: Any) -> dict[str, Any]:
    """Numbers, and arrays of metrics that give one per class or threshold."""
    found = {k: np.asarray(v) for k, v in model.get_metrics_result().items()}
    return {k: v if v.ndim else float(v) for k, v in found.items()}


def _assign(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
