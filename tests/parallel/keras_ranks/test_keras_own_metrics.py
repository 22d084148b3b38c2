"""Metrics of Keras and of the user's, over all ranks: exact, or named in a warning."""

import warnings
from typing import ClassVar

import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf
from keras import metrics as km

import zerohvd.keras as zero

RANKS = (2, 3)

CLASSES = 3
BATCH = 2 * world.SIZE
COUNT = 2 * BATCH + 1  # the last batch leaves all ranks but one without samples


def per_sample(y, p):
    return keras.ops.mean(keras.ops.square(y - p), axis=-1)


def per_batch(y, p):
    return keras.ops.mean(keras.ops.square(y - p))


class Peaks(km.Metric):
    """Two variables that are no sums, and one that is; and a metric inside."""

    across_ranks: ClassVar = {"high": "max", "low": "min", "seen": "sum"}

    def __init__(self, name="peaks"):
        super().__init__(name=name)
        self.high = self.add_variable((), "zeros", name="high")
        self.low = self.add_variable((), "zeros", name="low")
        self.seen = self.add_variable((), "zeros", name="seen")
        self.mean = km.Mean()

    def update_state(self, y, p, sample_weight=None):
        self.high.assign(keras.ops.maximum(self.high, keras.ops.max(p)))
        self.low.assign(keras.ops.minimum(self.low, keras.ops.min(p - y)))
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(p)[0], "float32"))
        self.mean.update_state(keras.ops.max(p, axis=-1))

    def result(self):
        return {
            "high": self.high + 0, "low": self.low + 0, "seen": self.seen + 0,
            "mean": self.mean.result(),
        }  # fmt: skip


class Last(km.Metric):
    across_ranks = "last"

    def __init__(self, name="last"):
        super().__init__(name=name)
        self.value = self.add_variable((CLASSES,), "zeros", name="value")

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(p[-1])

    def result(self):
        return self.value + 0


class Sure(km.Mean):
    """Feeds the sums of Keras' Mean: nothing to declare."""

    def __init__(self, name="sure"):
        super().__init__(name=name)

    def update_state(self, y, p, sample_weight=None):
        return super().update_state(keras.ops.max(p, axis=-1), sample_weight)


class Unsaid(km.Metric):
    def __init__(self, name="unsaid"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y, p, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(p)))

    def result(self):
        return self.value + 0


def every_metric_of_keras():
    """One of each class, with options by which they keep other states."""
    half = {"PrecisionAtRecall", "RecallAtPrecision", "SensitivityAtSpecificity"}
    named = {name: {"name": name} for name in dir(km) if name[0].isupper()}
    named["Precision"]["thresholds"] = [0.2, 0.5]
    for name in (*half, "SpecificityAtSensitivity"):
        named[name][name.partition("At")[2].lower()] = 0.4
    for name in ("OneHotIoU", "OneHotMeanIoU"):
        named[name]["num_classes"] = CLASSES
    named["OneHotIoU"]["target_class_ids"] = [0, 2]
    # Not for one-hot labels; Metric itself, and those that are given values, by Sure above.
    others = "Metric Mean Sum MeanMetricWrapper IoU MeanIoU Accuracy"
    others += " SparseCategoricalAccuracy SparseTopKCategoricalAccuracy"
    others += " SparseCategoricalCrossentropy"
    made = [getattr(km, n)(**o) for n, o in named.items() if n not in others.split()]
    return [
        *made, km.AUC(multi_label=True, name="auc_labels"),
        km.R2Score("variance_weighted_average", name="r2_variance"),
        km.F1Score("micro", threshold=0.4, name="f1_micro"), km.Recall(class_id=1, name="recall_1"),
        km.MeanMetricWrapper(per_sample, name="wrapped"), per_sample, "accuracy",
    ]  # fmt: skip


def reported(distributed, metrics, weighted, batch=BATCH, **options):
    """What a fit with validation and an evaluation report, by one process or by all ranks."""
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(COUNT, 7)).astype("float32")
    y = np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, COUNT)]
    weight = rng.uniform(0.2, 3.0, COUNT).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(batch, **options)
    model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(CLASSES, "softmax")])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer = zero.DistributedOptimizer(optimizer) if distributed else optimizer
    model.compile(optimizer, "mse", metrics=metrics(), weighted_metrics=weighted())
    data = zero.shard_dataset(data) if distributed else data
    averages = {"callbacks": [zero.callbacks.MetricAverage()] if distributed else [], "verbose": 0}
    found = {k: v[0] for k, v in model.fit(data, validation_data=data, **averages).history.items()}
    evaluated = model.evaluate(data, return_dict=True, **averages)
    return {**found, **{f"evaluate/{k}": v for k, v in evaluated.items()}}


def assert_reported_alike(*arguments, **options):
    plain, ours = (reported(d, *arguments, **options) for d in (False, True))
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        for got, expected in zip(tf.nest.flatten(ours[name]), tf.nest.flatten(value), strict=True):
            np.testing.assert_allclose(got, expected, rtol=5e-6, atol=2e-6, err_msg=name)


@world.at_two_ranks
def test_all_metrics_of_keras_are_those_of_one_process():
    def weighted():
        return [km.AUC(name="w_auc"), km.R2Score(name="w_r2"), km.F1Score(name="w_f1"), "mae"]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the metric")
        assert_reported_alike(every_metric_of_keras, weighted)


def test_a_rank_without_samples_keeps_what_metrics_given_as_objects_have_counted():
    assert_reported_alike(lambda: [km.CategoricalAccuracy(), km.AUC(name="auc")], list)


def test_metrics_of_ones_own_that_say_what_their_variables_are():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the metric")
        assert_reported_alike(lambda: [Peaks(), Last(), Sure()], lambda: [Sure("w_sure")])


def told(metrics, *arguments, **options):
    """What rank 0 is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_reported_alike(metrics, *arguments, **options)
    said = [str(w.message) for w in caught if "the metric" in str(w.message)]
    assert world.RANK == 0 or not said
    return said


def test_a_function_that_gives_one_number_per_batch_is_exact_if_it_is_a_mean_and_named():
    said = told(lambda: [per_batch], list)
    if world.RANK == 0:
        (only,) = said  # once, not for every epoch
        assert "'per_batch'" in only and "one value per sample" in only


@world.at_two_ranks
def test_metrics_that_nobody_knows_are_named_once():
    def unknown():
        return [Unsaid(), km.PearsonCorrelation(axis=0, name="across")]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reported(True, unknown, list, drop_remainder=True)
    said = [str(w.message) for w in caught if "the metric" in str(w.message)]
    if world.RANK == 0:
        assert len(said) == 2
        assert "'unsaid'" in said[0] and "across_ranks = 'sum'" in said[0] and "'value'" in said[0]
        assert "'across'" in said[1] and "one value per sample" in said[1]


@world.at_two_ranks
def test_a_wrong_declaration_is_refused():
    class Wrong(Unsaid):
        across_ranks: ClassVar = {"values": "max"}

    with pytest.raises(ValueError, match=r"'unsaid' must be one of .*'max'.*\['value'\]"):
        reported(True, lambda: [Wrong()], list)


@world.at_two_ranks
def test_an_evaluation_of_a_part_says_so_once_and_needs_no_other_rank():
    model = world.make_model()
    model.compile(zero.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    whole = tf.data.Dataset.from_tensor_slices((world.X, world.Y)).batch(world.SIZE * 3)
    data = zero.shard_dataset(whole)
    model.fit(data, verbose=0)
    if world.RANK == 0:
        with pytest.warns(UserWarning, match=r"callbacks=\[zero.callbacks.MetricAverage\(\)\]"):
            model.evaluate(data, verbose=0)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="model.evaluate")
            model.evaluate(data, verbose=0)
    average = zero.callbacks.MetricAverage()
    got = model.evaluate(data, callbacks=average, verbose=0)  # a number, as Keras gives it
    np.testing.assert_allclose(got, model.evaluate(whole, verbose=0), rtol=1e-6)
