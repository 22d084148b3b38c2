"""Which optimizers are elementwise and may be cut anywhere, and which need whole variables."""

from __future__ import annotations

from typing import Any

import keras

from zerohvd.keras import compat

_NAMES = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Nadam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "Ftrl",
    "Lion",
    "ScheduleFreeAdamW",
)
# Older Keras versions lack some of them.
_ELEMENTWISE = tuple(getattr(keras.optimizers, n) for n in _NAMES if hasattr(keras.optimizers, n))


def choose(optimizer: Any, asked: str) -> str:
    """ "flat" or "parameter" for this optimizer.

    A class that is not known may compute anything from whole variables, hence "parameter"; so may
    a subclass with an update of its own.
    """
    multi = getattr(keras.optimizers, "MultiOptimizer", None)
    if multi is not None and isinstance(optimizer, multi):
        raise ValueError(
            "MultiOptimizer cannot be wrapped as a whole: train each group of variables with a "
            "DistributedOptimizer of its own"
        )
    if asked != "auto":
        return asked
    known = any(compat.updates_like(optimizer, cls) for cls in _ELEMENTWISE)
    return "flat" if known else "parameter"
