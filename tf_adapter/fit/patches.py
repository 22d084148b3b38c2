"""The few places where Keras itself has to know that an optimizer is distributed.

Each wraps a public method and leaves every other optimizer alone.

`LossScaleOptimizer.apply` looks for overflows on its own rank and branches: ranks would take
different branches around our collectives. Where it wraps a DistributedOptimizer (by hand, or by
`compile` under mixed_float16), the check moves behind the reduction and all ranks agree on it.

`LossScaleOptimizer.save_own_variables` stores the inner optimizer's variables too, which here are
one rank's share.

`Model.compile` switches XLA on where it can; Horovod has no such operations in XLA.

`Model.compile_from_config`, of `load_model`, builds the optimizer, which all ranks have to do
together: that waits until they train.

`Model.save_weights` stores the optimizer's state along with the weights: one rank cannot do that,
so the state stays out of it. Saving a model would fail after the file has been emptied, or in the
HDF5 format not fail at all: it is refused before.

`SwapEMAWeights` exchanges variables and moving averages one by one; here averages are shared out.

`Model.fit`, `evaluate` and `predict` draw progress bars: on rank 0 only, unless asked for. And
where another rank saves meanwhile, they say so. And on a dataset in uneven parts, they count
samples (see `uneven`).

`Model.train_on_batch` is traced once or twice, and takes the weight of each call.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from zerohvd.errors import ShardedStateError
from zerohvd.keras.communication.wire import join
from zerohvd.keras.fit import uneven
from zerohvd.keras.optimizer import averages, weighting

_models: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_installed = False
_loading = False


def install() -> None:
    """Wrap the methods, once."""
    global _installed
    if _installed:
        return
    _installed = True
    scaler = keras.optimizers.LossScaleOptimizer
    scaler.apply = _scaled_apply(scaler.apply)
    scaler.save_own_variables = _save_scaler(scaler.save_own_variables)
    scaler.load_own_variables = _load_scaler(scaler.load_own_variables)
    _wrap_model_method("compile", _compile)
    _wrap_model_method("compile_from_config", _load)
    _wrap_model_method("save_weights", _save_weights)
    for name in ("fit", "evaluate", "predict"):
        _wrap_model_method(name, _quiet)
    _wrap_model_method("fit", _warn_of_backups)
    for name, step in (("fit", "train_step"), ("evaluate", "test_step")):
        _wrap_model_method(name, functools.partial(uneven.wrap, step=step, unwrap=unwrap))
    _wrap_model_method("train_on_batch", weighting.holding)
    saving_lib.save_model = _whole_models_only(saving_lib.save_model)
    legacy_h5_format.save_model_to_hdf5 = _no_hdf5(legacy_h5_format.save_model_to_hdf5)
    swapping = getattr(keras.callbacks, "SwapEMAWeights", None)  # older Keras versions lack it
    swaps = {"_swap_variables": averages.swap, "_finalize_ema_values": averages.keep}
    for name, exchange in swaps.items():
        if hasattr(swapping, name):
            setattr(swapping, name, _on_shards(getattr(swapping, name), exchange))


def _wrap_model_method(name: str, wrap: Any) -> None:
    # Where it is defined: to load_model, a Model.compile of its own would be a user's.
    owner = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
    setattr(owner, name, wrap(vars(owner)[name]))


def unwrap(optimizer: Any) -> Any:
    """The DistributedOptimizer that `optimizer` is or wraps, or None."""
    from zerohvd.keras.optimizer.distributed import DistributedOptimizer

    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer if isinstance(optimizer, DistributedOptimizer) else None


def ranks_of(model: Any) -> Any:
    """Eager collectives of the ranks that train `model`."""
    optimizer = unwrap(getattr(model, "optimizer", None))
    if optimizer is not None and optimizer.step is not None:
        return optimizer.step.wire.eager
    return join(optimizer.process_set if optimizer is not None else None)


def other_state(optimizer: Any) -> list[Any]:
    """What else in the optimizer's model must start alike: statistics, but no random seeds."""
    found = _models.get(optimizer)
    model = found() if found is not None else None
    if model is None:
        return []
    return [v for v in model.non_trainable_variables if "float" in str(v.dtype)]


def refuse_xla() -> None:
    """Raise if the caller is being compiled by XLA, before it fails with a riddle."""
    graph = tf.compat.v1.get_default_graph() if not tf.executing_eagerly() else None
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                raise ValueError(
                    "Horovod has no XLA operations for sharded training: use "
                    "tf.function(jit_compile=False) around opt.apply, and "
                    "model.compile(..., jit_compile=False)"
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)


def _scaled_apply(original: Any) -> Any:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
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

    return apply


def _compile(original: Any) -> Any:
    @functools.wraps(original)
    def compile_(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        uneven.forget(self)
        inner = unwrap(getattr(self, "optimizer", None))
        if inner is None:
            return result
        _models[inner] = weakref.ref(self)
        if inner.scaler is not None:
            self.optimizer = inner  # compile wrapped it once more
        if self.jit_compile:
            self.jit_compile = False
            if not hvd.is_initialized() or hvd.rank() == 0:
                print("zerohvd: jit_compile is off for this model: Horovod has no XLA operations.")
        return result

    return compile_


def _load(original: Any) -> Any:
    @functools.wraps(original)
    def compile_from_config(self: Any, config: Any) -> Any:
        global _loading
        before, _loading = _loading, True
        try:
            return original(self, config)
        finally:
            _loading = before

    return compile_from_config


def is_loading() -> bool:
    """Whether `load_model` is compiling a model on this rank, and perhaps on no other."""
    return _loading


def _save_scaler(original: Any) -> Any:
    @functools.wraps(original)
    def save_own_variables(self: Any, store: Any) -> None:
        if unwrap(self) is None:
            original(self, store)
            return
        for index, variable in enumerate(self._variables):
            store[str(index)] = variable.numpy()

    return save_own_variables


def _load_scaler(original: Any) -> Any:
    @functools.wraps(original)
    def load_own_variables(self: Any, store: Any) -> None:
        if unwrap(self) is None:
            original(self, store)
            return
        for index, variable in enumerate(self._variables):
            variable.assign(store[str(index)])

    return load_own_variables


def verbose() -> str | int:
    """For `fit(verbose=...)` and the like: a progress bar on rank 0, silence elsewhere."""
    return "auto" if not hvd.is_initialized() or hvd.rank() == 0 else 0


def _quiet(original: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "verbose" not in kwargs and unwrap(getattr(self, "optimizer", None)) is not None:
            names = list(inspect.signature(original).parameters)
            if names.index("verbose") > len(args):
                kwargs["verbose"] = verbose()
        from zerohvd.keras.optimizer.entry import explained

        with explained():
            return original(self, *args, **kwargs)

    return method


def _save_weights(original: Any) -> Any:
    @functools.wraps(original)
    def save_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = unwrap(getattr(self, "optimizer", None))
        if optimizer is None:
            return original(self, *args, **kwargs)
        optimizer.saved_state = {}
        try:
            return original(self, *args, **kwargs)
        finally:
            optimizer.saved_state = None

    return save_weights


def _whole_models_only(original: Any) -> Any:
    @functools.wraps(original)
    def save_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = unwrap(getattr(model, "optimizer", None))
        if optimizer is not None:
            optimizer.check_savable()
        return original(model, *args, **kwargs)

    return save_model


def _no_hdf5(original: Any) -> Any:
    @functools.wraps(original)
    def save_model_to_hdf5(
        model: Any, filepath: Any, overwrite: bool = True, include_optimizer: bool = True
    ) -> Any:
        optimizer = unwrap(getattr(model, "optimizer", None))
        if include_optimizer and optimizer is not None and optimizer.is_sharded:
            raise ShardedStateError(
                f"{filepath}: an HDF5 file would hold this rank's share of the optimizer state as "
                "if it were everything. Call zero.save_model(model, path) on all ranks with a path "
                "that ends with .keras; or store the model without its optimizer: "
                "model.save(path, include_optimizer=False)."
            )
        return original(model, filepath, overwrite, include_optimizer)

    return save_model_to_hdf5


def _on_shards(original: Any, exchange: Any) -> Any:
    @functools.wraps(original)
    def method(self: Any) -> Any:
        optimizer = unwrap(self.model.optimizer)
        if optimizer is None or optimizer.step is None or not optimizer.use_ema:
            return original(self)
        return exchange(optimizer.step)

    return method


def _warn_of_backups(original: Any) -> Any:
    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = unwrap(getattr(self, "optimizer", None))
        given = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
        callbacks = getattr(given.get("callbacks"), "callbacks", given.get("callbacks")) or []
        callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        if optimizer is not None and any(
            isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks
        ):
            warnings.warn(
                "BackupAndRestore cannot keep an optimizer state that is shared out: it brings "
                "back the weights alone. zero.callbacks.Checkpoint(folder) brings back everything.",
                stacklevel=2,
            )
        return original(self, *args, **kwargs)

    return fit
