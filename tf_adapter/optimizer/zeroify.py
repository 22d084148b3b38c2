"""From a Keras model and optimizer to a sharded one, in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from zerohvd.config import MIB, ZeroConfig
from zerohvd.keras import compat
from zerohvd.keras.communication.wire import Wire, join
from zerohvd.keras.optimizer import partition as partition_
from zerohvd.keras.optimizer.distributed import DistributedOptimizer
from zerohvd.keras.stage3.initial.deferred import deferred_init
from zerohvd.keras.stage3.sharding import check_shardable, shard_model
from zerohvd.keras.stage3.workload import describe
from zerohvd.planning import network as networks
from zerohvd.planning.choice import check_auto, choose_together
from zerohvd.planning.plan import Plan, make_plan
from zerohvd.planning.workload import Wishes, Workload
from zerohvd.stage3.planning import PERSIST_BELOW, UnitOptions


def zeroify(
    model: keras.Model,
    optimizer: Any = None,
    *,
    memory: str | float | None = None,
    batch: Any = None,
    loss: Callable[[Any], Any] | None = None,
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
        memory: For stage="auto": what a rank may hold, such as "16GiB". The lowest stage that fits
            is taken, and the first rank says which.
        batch, loss: For stage="auto", as for `plan`: without a batch, activations are not counted.
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
    if check_auto(options.get("stage", 2), memory, batch=batch, loss=loss):
        how = {"memory": memory, "batch": batch, "loss": loss, "units": units}
        chosen = _choose(model, optimizer, {**how, "persist_below": persist_below, **options})
        options["stage"], units = chosen, units if chosen == 3 else None
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


def plan(
    model: keras.Model,
    optimizer: Any = None,
    *,
    ranks: int | Sequence[int] | None = None,
    memory: str | float | None = None,
    batch: Any = None,
    loss: Callable[[Any], Any] | None = None,
    network: networks.Network | str | Path | None = None,
    compute: float | None = None,
    units: Any = None,
    persist_below: int = PERSIST_BELOW,
    bucket_bytes: int = 8 * MIB,
    partition: str = "auto",
    master_dtype: str | None = None,
) -> Plan:
    """What every stage will hold and move per rank, before anything is sharded.

    Nothing is allocated and nothing is sent: the model may be built in `zero.deferred_init()`, and
    larger than this machine. `print(zero.plan(...))` shows it; `.stage` is the stage to choose.

    Args:
        model: Built, and not sharded yet.
        optimizer: The plain optimizer; that of the compiled model unless given.
        ranks: Numbers of ranks; Horovod's unless given.
        memory: What a rank may hold: "16GiB", "40GB" or bytes.
        batch: What the model is called with in one step on one rank: arrays, tensors or
            tf.TensorSpecs. Activations are measured with it, in the graph of the step.
        loss: Of the model's output; unless given, its sum.
        network: For the time of a step: a file of `zerohvd doctor --bandwidth`, or a Network.
        compute: Seconds that a step takes without communication.
        units, persist_below: As for `zeroify`.
        bucket_bytes, partition, master_dtype: As for `DistributedOptimizer`.
    """
    check_shardable(model)
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ValueError("plan needs an optimizer, or a model that is compiled with one")
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, DistributedOptimizer):
        raise ValueError("the optimizer is sharded already: give the plain one")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    config = ZeroConfig(bucket_bytes=bucket_bytes, master_dtype=master_dtype)
    how = partition_.choose(inner, partition)
    options = UnitOptions(units, persist_below)
    found = describe(model, inner, config, how, options, batch=batch, loss=loss)
    if ranks is None:
        ranks = hvd.size() if hvd.is_initialized() else 1
    return make_plan(found, ranks, memory=memory, network=network, compute=compute)


def _choose(model: Any, optimizer: Any, how: dict[str, Any]) -> int:
    """The stage that all ranks take."""
    ranks = join(how.get("process_set"))
    known = {k: v for k, v in how.items() if k in inspect.signature(plan).parameters}
    return choose_together(ranks, lambda: plan(model, optimizer, ranks=ranks.size, **known))


def workload(make: Callable[[], Any], wishes: Wishes) -> Workload:
    """For the command line: describe the model that `make` returns, built without memory."""
    with deferred_init():
        made = make()
        model, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, keras.Model):
            raise ValueError(
                "expected a function that returns a keras.Model, or a model and its optimizer; it "
                f"returned {type(made).__name__}"
            )
        if not model.built and wishes.batch is not None:
            model.build(wishes.batch)
    check_shardable(model)
    if wishes.precision not in (None, "fp32"):
        raise ValueError(
            "--precision is for numbers and torch models: a Keras model has its dtype policy"
        )
    optimizer = keras.optimizers.get(optimizer or _NAMES.get(wishes.optimizer, wishes.optimizer))
    batch = None
    if wishes.batch is not None:
        batch = tf.TensorSpec(wishes.batch, wishes.batch_dtype or _input_dtype(model))
    how = partition_.choose(optimizer, "auto")
    config = ZeroConfig(bucket_bytes=8 * MIB)
    return describe(model, optimizer, config, how, UnitOptions(), batch=batch, loss=wishes.loss)


_NAMES = {"momentum": {"class_name": "SGD", "config": {"momentum": 0.9}}}


def _input_dtype(model: Any) -> str:
    """Of what the model is called with: numbers of tokens if it begins with an embedding."""
    inputs = getattr(model, "inputs", None)
    if inputs:
        return str(inputs[0].dtype)
    with_weights = [layer for layer in model.layers if layer.weights]
    tokens = with_weights and isinstance(with_weights[0], keras.layers.Embedding)
    return "int32" if tokens else "float32"


def _shard(
    model: Any, optimizer: DistributedOptimizer, options: UnitOptions, recompute: Any
) -> None:
    """Shard the variables of the model, for this optimizer to update."""
    if not isinstance(recompute, bool) and not callable(recompute):
        raise TypeError(
            f"recompute must be True, False or a predicate of a layer, got {recompute!r}"
        )
    check_shardable(model)
    how = partition_.choose(optimizer.inner_optimizer, optimizer.config.partition)
    with tf.init_scope():
        wire = Wire(optimizer.process_set, optimizer.config)
        sharded = shard_model(
            model, options, recompute, optimizer.config, how, wire, broadcast=optimizer.broadcast
        )
    optimizer.attach(sharded)
