"""`evaluate` outside of `fit`: of this rank's samples, or of all ranks' under MetricAverage.

One rank alone may evaluate, so nothing is added up over the ranks unless the user asks for it.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from zerohvd.keras import compat
from zerohvd.keras.fit import uneven
from zerohvd.keras.optimizer.distributed import optimizer_of, ranks_of

_told: weakref.WeakSet[Any] = weakref.WeakSet()  # models, once is enough


def run(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `evaluate`, and return what MetricAverage has found, if there is one."""
    if optimizer_of(model) is None or uneven.is_fitting(model):
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs)
    callbacks = uneven.averaging(given.arguments)
    if not callbacks:
        _warn_of_part(model, given.arguments.get("x"))
        return original(model, *args, **kwargs)
    as_dict = given.arguments.get("return_dict", False)
    given.arguments["return_dict"] = True
    logs = {**original(*given.args, **given.kwargs), **callbacks[0].evaluated}
    return logs if as_dict else compat.flatten_metrics(model, logs)


def _warn_of_part(model: Any, data: Any) -> None:
    if uneven.parts_of(data) is None or model in _told:
        return
    _told.add(model)
    if ranks_of(model).rank == 0:
        warnings.warn(
            "model.evaluate() on a part of a dataset (zero.shard_dataset) gives the metrics of "
            "this rank's samples alone. Those of all samples, on all ranks: model.evaluate(data, "
            "callbacks=[zero.callbacks.MetricAverage()])",
            stacklevel=4,
        )
