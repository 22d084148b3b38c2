"""Batches that do not divide evenly: `fit` weights each rank by the samples it has.

`shard_dataset` marks a dataset whose parts may differ in size. `fit` and `evaluate` find the mark,
and wrap the model's steps for as long as they run:

- losses that are no means over samples are those of the whole batch, see `losses`;
- the gradients of a training step are weighted by the number of samples, as by `zero.weight`;
- a rank without samples, over which a model cannot average, runs the step on one row of zeros; its
  gradients become zeros, and metrics and statistics are restored.

Samples get no `sample_weight` for that, so every metric counts them as plain Keras does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from zerohvd.communication.rendezvous import Call
from zerohvd.keras import compat
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.fit import batches, counts, losses, metrics
from zerohvd.keras.fit.callback_list import given_callbacks
from zerohvd.keras.optimizer import entry, weighting
from zerohvd.keras.optimizer.distributed import optimizers_of
from zerohvd.keras.params.pieces import shard_of


class Parts(NamedTuple):
    """How the batches of a dataset are shared among ranks."""

    usual: float  # how many samples make a weight of 1
    even: bool  # all parts have the same number of samples
    process_set: Any  # the ranks that share


_marked: weakref.WeakKeyDictionary[Any, Parts] = weakref.WeakKeyDictionary()
# Where a Keras model keeps the function it has traced for a step; "make_" and that makes it.
_TRACED = {"train_step": "train_function", "test_step": "test_function"}
_fitting: list[Any] = []  # models whose `fit` is running


def mark(dataset: tf.data.Dataset, parts: Parts) -> tf.data.Dataset:
    """Have `fit` count the samples in batches of `dataset`, and of datasets made from it.

    A rank that has as many samples as usual, the same on all ranks, has a weight of exactly 1,
    which changes no gradient.
    """
    _marked[dataset] = parts
    return dataset


def parts_of(data: Any) -> Parts | None:
    """What `data` was marked with, or what it was made from by repeat, prefetch and the like."""
    if not isinstance(data, tf.data.Dataset):
        return None
    found = (parts_of(d) for d in compat.dataset_inputs(data))
    return _marked.get(data) or next((f for f in found if f is not None), None)


def is_fitting(model: Any) -> bool:
    """Whether `fit` is running on data that ranks share."""
    return any(model is m for m in _fitting)


def averaging(given: Mapping[str, Any]) -> list[Any]:
    """The callbacks in the arguments of `evaluate` that report the metrics of all ranks."""
    return [c for c in given_callbacks(dict(given)) if hasattr(c, "evaluated")]


def steps_plainly(model: Any) -> bool:
    """Whether the model's train_step is Keras' own."""
    return compat.is_plain_step(getattr(model, "train_step", None))


def run(step: str, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `fit` ("train_step") or `evaluate` ("test_step"), counting samples if data is marked."""
    given = inspect.signature(original).bind_partial(model, *args, **kwargs).arguments
    optimizers = optimizers_of(model)
    parts = parts_of(given.get("x")) if optimizers else None
    trains = step == "train_step"
    for optimizer in optimizers if trains else ():
        if optimizer.step is not None:
            optimizer.step.begins_with = None if parts is None else model.__dict__.get(_FIRST)
        # In the first step ranks compare it anyway; later, ranks with and without counts deadlock.
        counted = parts is not None and not parts.even
        call = Call.FIT_COUNTED if counted else Call.FIT
        _compare(optimizer, call, counts.planned(given))
    # One rank alone may evaluate below stage 3, but not validate in `fit`, nor ask for what all
    # ranks have.
    together = trains or is_fitting(model) or bool(averaging(given))
    if not trains:
        _come_together(Call.EVALUATE, model, given)
    if parts is None or (parts.even and not together):
        return original(model, *args, **kwargs)
    _fitting.append(model if trains else None)
    try:
        with _counting(model, step, parts, together):
            return original(model, *args, **kwargs)
    finally:
        _fitting.pop()


def predict(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `predict`; at stage 3 all ranks must."""
    given = inspect.signature(original).bind_partial(model, *args, **kwargs).arguments
    _come_together(Call.PREDICT, model, given)
    return original(model, *args, **kwargs)


def _come_together(call: Call, model: Any, given: Any) -> None:
    """At stage 3 the layers' variables come from all ranks: raise on those that came alone."""
    for callback in given_callbacks(dict(given)):
        if hasattr(callback, "end_epoch"):  # of `fit`, which validates
            callback.end_epoch()
    for optimizer in optimizers_of(model):
        if optimizer.sharded is not None and optimizer.step is not None:
            _compare(optimizer, call, counts.planned(given))


# Where a model keeps the name of the first collective of its steps, if a loss begins with one.
_FIRST = "_zero_first_collective"


def _kind(parts: Parts, together: bool) -> str:
    return f"_zero_{'even' if parts.even else 'counted'}{'_together' if together else ''}"


def _compare(optimizer: Any, call: Call, mine: counts.Planned) -> None:
    """Raise on all ranks if they will not train equally long, or on other kinds of data."""
    if optimizer.step is None:
        heard = entry.meet_first(optimizer.process_set, mine)
    else:
        heard = entry.meet(optimizer.step, call, mine)
    said = call.said.partition(" on ")[0].partition(" at ")[0]
    difference = counts.different([counts.Planned(*numbers) for numbers in heard], said)
    if difference is not None:
        raise difference


@contextlib.contextmanager
def _counting(model: Any, step: str, parts: Parts, together: bool) -> Iterator[None]:
    """Replace the model's step by one that counts samples, and its traced function likewise.

    Who has set the model's function to None, or made it anew, wants all of it traced again: after
    a change of the optimizer, say, which the function that counts would otherwise never see.
    """
    traced, counted = _TRACED[step], f"{_kind(parts, together)}_{step}"
    plain, plain_traced = getattr(model, step), getattr(model, traced)
    own = model.__dict__.get(step)  # a step that the user has set on the instance
    # Not by setattr: Keras would track variables in what it is given.
    place = model.__dict__
    kept, beside = place.get(counted, (None, None))
    setattr(model, traced, kept if beside is plain_traced else None)
    place[step] = functools.partial(_step, model, plain, parts, step == "train_step", together)
    try:
        yield
    finally:
        kept = getattr(model, traced)
        setattr(model, traced, plain_traced)
        if own is None:
            del place[step]
        else:
            place[step] = own
        getattr(model, f"make_{traced}")()  # unless it has one, so that None is the user's
        place[counted] = (kept, getattr(model, traced))


def forget(model: Any) -> None:
    """Drop traced functions: the model has been compiled again."""
    for name in [n for n in model.__dict__ if n.startswith("_zero_")]:
        del model.__dict__[name]


def _step(
    model: Any, step: Callable[[Any], Any], parts: Parts, trains: bool, together: bool, data: Any
) -> Any:
    count = _count(data)
    weight = None if parts.even else tf.cast(count, tf.float32) / parts.usual
    names: list[str] = []
    with contextlib.ExitStack() as inside:
        if together:
            whole = losses.of_whole_batches(parts.process_set, count, weight)
            names = inside.enter_context(whole)
            inside.enter_context(_batches_counted(count, _total(model, parts, count, names)))
        if parts.even:
            result = step(data)
        else:
            if trains:
                plain = compat.is_plain_step(step)
                inside.enter_context(weighting.held(weight, in_loss=plain))
            result = _without_trace(model, step, data, count)
    if trains:
        model.__dict__[_FIRST] = names[0] if names else None
        for optimizer in optimizers_of(model):
            if optimizer.step is not None:
                optimizer.step.begins_with = model.__dict__[_FIRST]
    return result


def _total(model: Any, parts: Parts, count: Any, names: list[str]) -> Callable[[], Any] | None:
    """How many samples the ranks have together, when it is asked for; None: equally many."""
    if parts.even:
        return None

    @functools.cache
    def total(place: Any) -> Any:
        names.append(f"zero.count.{len(names)}")
        with after([count]):
            return losses.add_up(tf.cast(count, tf.float32), names[-1], parts.process_set)

    if tf.executing_eagerly() and not any(o.sharded for o in optimizers_of(model)):
        total(None)  # or a step would begin with another collective than `entry` expects
    return lambda: total(None if tf.executing_eagerly() else tf.compat.v1.get_default_graph())


@contextlib.contextmanager
def _batches_counted(count: Any, total: Callable[[], Any] | None) -> Iterator[None]:
    """Have a batch count as one where a mean is given one number per batch, as Keras does.

    That are losses of several outputs, metric functions that return a number, and loss trackers of
    the user's. Each rank's part counts by its share of the samples: a part of one sample would
    otherwise count as much as one of many. Only the ranks together know the share, and only such
    metrics need it; `total` adds up the samples, None where ranks have equally many.
    """
    original = keras.metrics.Mean.update_state

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
            metrics.note_per_batch(self)
            if total is not None:
                sample_weight = tf.math.divide_no_nan(tf.cast(count, tf.float32), total())
        return original(self, values, sample_weight)

    keras.metrics.Mean.update_state = update_state
    try:
        yield
    finally:
        keras.metrics.Mean.update_state = original


def _count(data: Any) -> Any:
    first = next(t for t in tf.nest.flatten(data) if t is not None)
    # A step without data must not count: the other ranks would not be there to add it up.
    parts = tf.nest.flatten(first, expand_composites=True)
    with tf.control_dependencies([] if tf.executing_eagerly() else parts):
        return tf.identity(batches.rows(first))


def _without_trace(model: Any, step: Callable[[Any], Any], data: Any, count: Any) -> Any:
    """Run the step; without samples on a row of zeros, restoring all other state after it."""
    # A model knows the metrics of `compile` only after its first step.
    metric_variables = [v for m in compat.compiled_metrics(model) for v in m.variables]
    found = (*model.non_trainable_variables, *model.metrics_variables, *metric_variables)
    state = {id(v): v for v in found}
    state = {k: v for k, v in state.items() if shard_of(v) is None}  # frozen ones do not change
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
    # The row of zeros is in the metrics that the step has returned.
    now = {k: v for k, v in model.get_metrics_result().items() if k in result}
    return {**result, **{k: _either(count, result[k], v) for k, v in now.items()}}


def _either(count: Any, with_samples: Any, without: Any) -> Any:
    if isinstance(without, dict):  # a metric may have several results
        return {k: _either(count, with_samples[k], v) for k, v in without.items()}
    with_samples = tf.convert_to_tensor(with_samples)
    return tf.cond(count > 0, lambda: with_samples, lambda: tf.cast(without, with_samples.dtype))


def _stand_in(t: Any, count: Any) -> Any:
    """The tensor, or one row of zeros if it has no rows."""
    if t is None:
        return None
    full = tf.cond(count > 0, lambda: t, lambda: batches.one_row(t))
    if isinstance(t, tf.Tensor) and t.shape.rank is not None:
        full.set_shape([None, *t.shape[1:]])
    return full
