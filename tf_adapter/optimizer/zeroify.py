"""From a Keras model and optimizer to a sharded one, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from zerohvd.keras import compat
from zerohvd.keras.communication.wire import Wire
from zerohvd.keras.optimizer import partition
from zerohvd.keras.optimizer.distributed import DistributedOptimizer
from zerohvd.keras.stage3.sharding import check_shardable, shard_model
from zerohvd.stage3.planning import PERSIST_BELOW, UnitOptions


def zeroify(
    model: keras.Model,
    optimizer: Any = None,
    *,
    units: Any = None,
    persist_below: int = PERSIST_BELOW,
    recompute: bool | Callable[[Any], bool] = True,
    **options: Any,
) -> tuple[Any, Any]:
    """Wrap the optimizer, give all ranks the weights of rank 0, and return both.

    At stage 3 the model's variables are sharded too. A unit's are gathered when its layer is
    called, and freed after it; backward gathers them again, calls the layer once more, and leaves
    each rank its part of the gradients. `tape.gradient(loss, model.trainable_variables)` then
    gives this rank's parts of the gradients' sum over the ranks, 1-D: pass them to the optimizer,
    and let it clip. What uses no unit stays gathered during a call of the model. All ranks must
    call the model alike.

    Args:
        model: Built or not, compiled or not. A compiled model is compiled again with the wrapped
            optimizer, everything else as it was.
        optimizer: The optimizer to wrap; that of the compiled model unless given.
        units: Stage 3: which layers are units: a class, a tuple of classes, a predicate of a
            layer, or a list of layers. Unless given: composite layers that repeat, such as a
            transformer's blocks and nested models, or else all layers with weights.
        persist_below: Stage 3: variables with fewer elements stay gathered.
        recompute: Stage 3: False, or a predicate of a layer: backward does not call units again;
            their variables and activations stay from forward to backward.
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
    if optimizer.config.stage == 3:
        _shard(model, optimizer, UnitOptions(units, persist_below), recompute)
    elif units is not None:
        raise ValueError(f"units= needs stage=3, got stage={optimizer.config.stage}")
    if compiled:
        settings = {**compat.compile_arguments(model), "optimizer": optimizer}
        model.compile(**{**settings, "jit_compile": False})
    if model.built and model.trainable_variables:
        (model.optimizer if compiled else optimizer).build(model.trainable_variables)
    return model, optimizer


def _shard(
    model: Any, optimizer: DistributedOptimizer, options: UnitOptions, recompute: Any
) -> None:
    """Shard the variables of the model, for this optimizer to update."""
    if not isinstance(recompute, bool) and not callable(recompute):
        raise TypeError(
            f"recompute must be True, False or a predicate of a layer, got {recompute!r}"
        )
    check_shardable(model)
    how = partition.choose(optimizer.inner_optimizer, optimizer.config.partition)
    with tf.init_scope():
        wire = Wire(optimizer.process_set)
        sharded = shard_model(
            model, options, recompute, optimizer.config, how, wire, broadcast=optimizer.broadcast
        )
    optimizer.attach(sharded)
