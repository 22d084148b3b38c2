"""From a Keras model and optimizer to a sharded one, in one call."""

from __future__ import annotations

from typing import Any

import keras

from zerohvd.keras import compat
from zerohvd.keras.optimizer.distributed import DistributedOptimizer


def zeroify(model: keras.Model, optimizer: Any = None, **options: Any) -> tuple[Any, Any]:
    """Wrap the optimizer, give all ranks the weights of rank 0, and return both.

    Args:
        model: Built or not, compiled or not. A compiled model is compiled again with the wrapped
            optimizer, everything else as it was.
        optimizer: The optimizer to wrap; that of the compiled model unless given.
        **options: Of `DistributedOptimizer`, such as `stage=2`.
    """
    compiled = getattr(model, "compiled", False)
    if optimizer is None:
        if not compiled:
            raise ValueError("zeroify needs an optimizer, or a model that is compiled with one")
        optimizer = model.optimizer
    if not isinstance(optimizer, DistributedOptimizer):
        optimizer = DistributedOptimizer(optimizer, **options)
    elif options:
        raise ValueError(
            f"the optimizer is a DistributedOptimizer already; give {sorted(options)} to it"
        )
    if compiled:
        settings = {**compat.compile_arguments(model), "optimizer": optimizer}
        model.compile(**{**settings, "jit_compile": False})
    if model.built and model.trainable_variables:
        (model.optimizer if compiled else optimizer).build(model.trainable_variables)
    return model, optimizer
