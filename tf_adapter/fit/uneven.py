"""Batches that do not divide evenly: `fit` counts each rank by the samples it has.

`shard_dataset` leaves its mark on a dataset whose parts may differ in size. `fit` and `evaluate`
find the mark, and wrap the model's steps for as long as they run:

- the gradients of a training step count by the number of samples, as `zero.weight` says it;
- a rank without samples, which models cannot average over, runs a stand-in that leaves no trace:
  its gradients are zeros, and metrics and statistics stay as they were.

Samples carry no weights for that, so every metric counts them as plain Keras does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from zerohvd.communication.rendezvous import Call
from zerohvd.keras.optimizer import entry, weighting

# Dataset -> how many samples make a weight of 1.
_marked: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
# Where a Keras model keeps the function it has traced for a step.
_TRACED = {"train_step": "train_function", "test_step": "test_function"}


def mark(dataset: tf.data.Dataset, usual: float) -> tf.data.Dataset:
    """Have `fit` count the batches of `dataset`, and of what is made of it.

    Args:
        dataset: This rank's part.
        usual: How many samples a rank usually has in a batch, the same on all ranks: so many make
            a weight of exactly 1, which changes no gradient.
    """
    _marked[dataset] = usual
    return dataset


def usual_count(data: Any) -> float | None:
    """What `data` was marked with, or what it was made of by repeat, prefetch and the like."""
    if not isinstance(data, tf.data.Dataset):
        return None
    found = (usual_count(d) for d in data._inputs())
    return _marked.get(data) or next((f for f in found if f is not None), None)


def wrap(original: Callable[..., Any], step: str, unwrap: Callable[[Any], Any]) -> Any:
    """`fit` or `evaluate` with the model's `step` counting the samples where the data asks for it.

    Args:
        original: The method.
        step: "train_step" or "test_step".
        unwrap: Gives the DistributedOptimizer that an optimizer is or wraps, or None.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        optimizer = unwrap(getattr(self, "optimizer", None))
        usual = usual_count(given.get("x")) if optimizer is not None else None
        # In the first step ranks compare it anyway; later those that count would wait for ever.
        if step == "train_step" and optimizer is not None and optimizer.step is not None:
            entry.meet(optimizer.step, Call.FIT if usual is None else Call.FIT_COUNTED)
        if usual is None:
            return original(self, *args, **kwargs)
        with _counting(self, step, usual):
            return original(self, *args, **kwargs)

    return method


@contextlib.contextmanager
def _counting(model: Any, step: str, usual: float) -> Iterator[None]:
    """Put a step that counts, and what was traced of it before, in the place of the model's."""
    traced, counted = _TRACED[step], f"_zero_counted_{step}"
    plain, plain_traced = getattr(model, step), getattr(model, traced)
    own = model.__dict__.get(step)  # if somebody has put a step there before
    # Not by setattr: Keras would look for variables in what it is given.
    place = model.__dict__
    setattr(model, traced, place.get(counted))
    place[step] = functools.partial(_step, model, plain, usual if step == "train_step" else None)
    try:
        yield
    finally:
        place[counted] = getattr(model, traced)
        setattr(model, traced, plain_traced)
        if own is None:
            del place[step]
        else:
            place[step] = own


def forget(model: Any) -> None:
    """Drop what was traced: the model has been compiled anew."""
    for step in _TRACED:
        model.__dict__.pop(f"_zero_counted_{step}", None)


def _step(model: Any, step: Callable[[Any], Any], usual: float | None, data: Any) -> Any:
    count = _count(data)
    with _losses_counted(model, count):
        if usual is None:
            return _without_trace(model, step, data, count)
        with weighting.held(tf.cast(count, tf.float32) / usual):
            return _without_trace(model, step, data, count)


@contextlib.contextmanager
def _losses_counted(model: Any, count: Any) -> Iterator[None]:
    """Have the losses of several outputs count samples, as the loss itself does.

    Keras counts a batch as one where it cannot tell the size while tracing; a part of one sample
    would then count as much as one of many.
    """
    original = keras.metrics.Mean.update_state

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        losses = getattr(getattr(model, "_compile_loss", None), "metrics", None) or []
        if sample_weight is None and any(self is m for m in losses):
            sample_weight = count
        return original(self, values, sample_weight)

    keras.metrics.Mean.update_state = update_state
    try:
        yield
    finally:
        keras.metrics.Mean.update_state = original


def _count(data: Any) -> Any:
    first = next(t for t in tf.nest.flatten(data) if t is not None)
    # A step without data must not count: the other ranks would not be there to add it up.
    with tf.control_dependencies([] if tf.executing_eagerly() else [first]):
        return tf.identity(tf.shape(first)[0])


def _without_trace(model: Any, step: Callable[[Any], Any], data: Any, count: Any) -> Any:
    """Run the step; without samples on a stand-in, and with all other state as it was."""
    state = {id(v): v for v in (*model.non_trainable_variables, *model.metrics_variables)}
    before = [tf.convert_to_tensor(v.value) for v in state.values()]
    result = step(tf.nest.map_structure(lambda t: _stand_in(t, count), data))

    def restore() -> Any:
        for variable, value in zip(state.values(), before, strict=True):
            variable.value.assign(value)
        for variable in model.metrics_variables:
            if id(variable) not in state:  # made in this step, its first
                variable.value.assign(tf.zeros_like(variable.value))
        return tf.constant(True)

    tf.cond(count > 0, lambda: tf.constant(False), restore)
    if not isinstance(result, dict):
        return result
    # The stand-in is in the metrics that the step has returned.
    now = {k: v for k, v in model.get_metrics_result().items() if k in result}
    return {**result, **{k: _either(count, result[k], v) for k, v in now.items()}}


def _either(count: Any, with_samples: Any, without: Any) -> Any:
    with_samples = tf.convert_to_tensor(with_samples)
    return tf.cond(count > 0, lambda: with_samples, lambda: tf.cast(without, with_samples.dtype))


def _stand_in(t: Any, count: Any) -> Any:
    """The tensor, or one row of zeros if it has no rows."""
    if not isinstance(t, tf.Tensor):
        return t

    def row() -> Any:
        return tf.zeros(tf.concat([[1], tf.shape(t)[1:]], 0), t.dtype)

    full = tf.cond(count > 0, lambda: t, row)
    full.set_shape([None, *t.shape[1:]])
    return full
