"""The few methods of Keras that have to know that an optimizer is distributed.

Each patch wraps a method and leaves every other optimizer alone; its docstring says what happens
without it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras

from zerohvd import limits
from zerohvd.errors import ShardedStateError
from zerohvd.keras import compat
from zerohvd.keras.fit import evaluating, foreign, reading, uneven
from zerohvd.keras.optimizer import averages, weighting
from zerohvd.keras.optimizer.distributed import DistributedOptimizer, optimizer_of, unwrap
from zerohvd.keras.optimizer.entry import explained

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_installed: list[bool] = []


def install() -> None:
    """Wrap the methods, once."""
    if _installed:
        return
    _installed.append(True)
    scaler = keras.optimizers.LossScaleOptimizer
    _patch(scaler, "build", _build_scaler)
    _patch(scaler, "apply", _apply_scaled)
    _patch(scaler, "save_own_variables", _save_scaler)
    _patch(scaler, "load_own_variables", _load_scaler)
    for name, wrap in (
        ("compile", _compile),
        ("compile_from_config", _compile_from_config),
        ("save_weights", _save_weights),
        ("fit", _quiet),
        ("evaluate", _quiet),
        ("predict", _quiet),
        ("fit", _warn_of_backups),
        ("fit", _wrapper(foreign.run)),
        ("fit", _wrapper(reading.run)),
        ("fit", _wrapper(functools.partial(uneven.run, "train_step"))),
        ("evaluate", _wrapper(functools.partial(uneven.run, "test_step"))),
        ("evaluate", _wrapper(evaluating.run)),
        ("predict", _wrapper(uneven.predict)),
        # Traced once: later calls need their own weight.
        ("train_on_batch", functools.partial(weighting.holding, in_loss=uneven.steps_plainly)),
    ):
        # Where it is defined: load_model takes a Model.compile of its own for a user's.
        owner = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
        _patch(owner, name, wrap)
    for (module, name), wrap in zip(compat.model_savers(), (_save_keras, _save_hdf5), strict=True):
        _patch(module, name, wrap)
    exchanges = (averages.swap, averages.keep)
    for (cls, name), exchange in zip(compat.average_swappers(), exchanges, strict=False):
        _patch(cls, name, _wrapper(functools.partial(_swap_averages, exchange)))


def _patch(owner: Any, name: str, wrap: Wrap) -> None:
    setattr(owner, name, wrap(getattr(owner, name)))


def _wrapper(around: Callable[..., Any]) -> Wrap:
    """Turn a function that takes the original first into one that wraps a method."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        return method

    return wrap


@_wrapper
def _build_scaler(original: Any, self: Any, variables: Any) -> None:
    """Build on no variables where they are sharded: Keras would number them by their values."""
    inner = unwrap(self)
    if inner is None or inner.sharded is None:
        original(self, variables)
        return
    inner.build(variables)
    original(self, [])


@_wrapper
def _apply_scaled(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Look for overflows after the reduction, where all ranks agree on them.

    LossScaleOptimizer looks on its own rank and branches: ranks would take different branches
    around collectives, a deadlock. `compile` wraps an optimizer under mixed_float16.
    """
    inner = unwrap(self)
    if inner is None:
        original(self, grads, trainable_variables)
        return
    if inner.scaler is not None:
        raise ValueError(
            "the loss is scaled twice: by the LossScaleOptimizer inside the "
            "DistributedOptimizer and by the one around it; keep one of them"
        )
    if not self.built:
        self.build(trainable_variables)
    inner.apply_scaled(grads, trainable_variables, self)


@_wrapper
def _save_scaler(original: Any, self: Any, store: Any) -> None:
    """Store the scaler's own variables: the others are one rank's shards."""
    if unwrap(self) is None:
        original(self, store)
        return
    for index, variable in enumerate(compat.scaler_variables(self)):
        store[str(index)] = variable.numpy()


@_wrapper
def _load_scaler(original: Any, self: Any, store: Any) -> None:
    if unwrap(self) is None:
        original(self, store)
        return
    for index, variable in enumerate(compat.scaler_variables(self)):
        variable.assign(store[str(index)])


@_wrapper
def _compile(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Switch XLA off, for which Horovod has no operations, and tell the optimizer its model."""
    result = original(self, *args, **kwargs)
    uneven.forget(self)
    inner = optimizer_of(self)
    if inner is None:
        return result
    inner.compiled_into(self)
    if inner.scaler is not None:
        self.optimizer = inner  # compile wrapped it once more
    if self.jit_compile:
        self.jit_compile = False
        if not hvd.is_initialized() or hvd.rank() == 0:
            print("zerohvd: jit_compile is off for this model: Horovod has no XLA operations.")
    return result


@_wrapper
def _compile_from_config(original: Any, self: Any, config: Any) -> Any:
    """Defer the build of the optimizer, a collective, when one rank alone calls `load_model`."""
    before, DistributedOptimizer.is_loading = DistributedOptimizer.is_loading, True
    try:
        return original(self, config)
    finally:
        DistributedOptimizer.is_loading = before


def verbose() -> str | int:
    """For `fit(verbose=...)` and the like: a progress bar on rank 0, silence elsewhere."""
    return "auto" if not hvd.is_initialized() or hvd.rank() == 0 else 0


@_wrapper
def _quiet(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw progress bars on rank 0 only, and explain Horovod's error if another rank saves."""
    if "verbose" not in kwargs and optimizer_of(self) is not None:
        names = list(inspect.signature(original).parameters)
        if names.index("verbose") > len(args):
            kwargs["verbose"] = verbose()
    with limits.during(f"model.{original.__name__}()"), explained():
        return original(self, *args, **kwargs)


@_wrapper
def _warn_of_backups(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
    callbacks = getattr(given.get("callbacks"), "callbacks", given.get("callbacks")) or []
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    backups = [c for c in callbacks if isinstance(c, keras.callbacks.BackupAndRestore)]
    if backups and optimizer_of(self) is not None:
        warnings.warn(
            "BackupAndRestore cannot keep a sharded optimizer state: it restores the weights "
            "alone. zero.callbacks.Checkpoint(folder) restores everything.",
            stacklevel=3,
        )
    return original(self, *args, **kwargs)


@_wrapper
def _save_weights(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the optimizer's state out of the file, which one rank alone could not collect."""
    optimizer = optimizer_of(self)
    if optimizer is None or (optimizer.sharded is not None and optimizer.saved_state is not None):
        return original(self, *args, **kwargs)
    if optimizer.sharded is not None:
        optimizer.check_savable()
    optimizer.saved_state = {}
    try:
        return original(self, *args, **kwargs)
    finally:
        optimizer.saved_state = None


@_wrapper
def _save_keras(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse before the file is emptied; `save_own_variables` would refuse after that."""
    optimizer = optimizer_of(model)
    if optimizer is not None:
        optimizer.check_savable()
    return original(model, *args, **kwargs)


@_wrapper
def _save_hdf5(
    original: Any, model: Any, filepath: Any, overwrite: bool = True, include_optimizer: bool = True
) -> Any:
    """Refuse: the HDF5 format stores `optimizer.variables`, which are one rank's shards."""
    optimizer = optimizer_of(model)
    if include_optimizer and optimizer is not None and optimizer.is_sharded:
        raise ShardedStateError(
            f"{filepath}: an HDF5 file would hold this rank's share of the optimizer state as "
            "if it were everything. Call zero.save_model(model, path) on all ranks with a path "
            "that ends with .keras; or store the model without its optimizer: "
            "model.save(path, include_optimizer=False)."
        )
    return original(model, filepath, overwrite, include_optimizer)


def _swap_averages(exchange: Callable[[Any, Any], None], original: Any, self: Any) -> Any:
    """Exchange sharded averages with whole variables; SwapEMAWeights pairs them one by one."""
    optimizer = unwrap(self.model.optimizer)
    if optimizer is None or optimizer.step is None or not optimizer.use_ema:
        return original(self)
    return exchange(optimizer.inner_optimizer, optimizer.step)
