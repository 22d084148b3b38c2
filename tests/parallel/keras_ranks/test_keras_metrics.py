"""What `fit` reports on all ranks together is what one plain Keras process reports."""

import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero

CLASSES = 3
BATCH = 2 * world.SIZE
# How many samples the last batch has; a batch of one leaves all ranks but one without.
LAST = {"one": 1, "one_more": world.SIZE + 1, "full": BATCH}


def samples(count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 7)).astype("float32")
    y = rng.integers(0, CLASSES, size=count)
    weight = rng.uniform(0.2, 3.0, size=count).astype("float32")
    return x, y, weight


def batches(count, weighted, seed=0):
    parts = samples(count, seed)[: 3 if weighted else 2]
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


@keras.saving.register_keras_serializable("tests")
class SquareRoot(keras.metrics.MeanMetricWrapper):
    def __init__(self, name="root"):
        super().__init__(keras.losses.sparse_categorical_crossentropy, name)

    def result(self):
        return keras.ops.sqrt(super().result())


def fitted(distributed, make_data, validation=None, compiled=None, **options):
    compiled = compiled or {}
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((7,)),
            keras.layers.Dense(9, "tanh", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(momentum=0.5, trainable=False),
            keras.layers.Dense(CLASSES, "softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.3)
    model.compile(
        zero.DistributedOptimizer(optimizer) if distributed else optimizer,
        loss="sparse_categorical_crossentropy",
        # Two that are no means: of what is averaged, the roots would be.
        metrics=[
            "accuracy",
            SquareRoot(),
            keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False, name="iou"),
        ],
        weighted_metrics=["accuracy"],
        **compiled,
    )
    shard = zero.shard_dataset if distributed else (lambda data: data)
    if validation is not None:
        options["validation_data"] = shard(validation)
    callbacks = [zero.callbacks.MetricAverage()] if distributed else []
    data = shard(make_data())
    return model.fit(data, epochs=2, verbose=0, callbacks=callbacks, **options), model


def assert_reported_alike(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("weighted", [False, True], ids=["samples", "sample_weight"])
@pytest.mark.parametrize("last", world.few(LAST, "one one_more"))
def test_metrics_of_uneven_datasets(last, weighted):
    def make():
        return batches(2 * BATCH + LAST[last], weighted)

    validation = batches(BATCH + LAST[last], weighted, seed=1)
    (got, ours), (expected, plain) = (fitted(d, make, validation) for d in (True, False))
    assert_reported_alike(got.history, expected.history)
    world.assert_same(world.weights(ours), world.weights(plain), bitwise=False, tolerance=2e-6)


def test_metrics_with_a_result_per_class_or_threshold():
    results = []
    x, y, _ = samples(2 * BATCH + 1)
    y = np.eye(CLASSES, dtype="float32")[y]
    for distributed in (False, True):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(CLASSES, "softmax")])
        optimizer = keras.optimizers.SGD(0.1)
        metrics = [
            keras.metrics.F1Score(name="f1"),
            keras.metrics.Recall(thresholds=[0.2, 0.5], name="recall"),
            keras.metrics.R2Score(class_aggregation=None, name="r2"),
            keras.metrics.AUC(name="auc"),
        ]
        model.compile(
            zero.DistributedOptimizer(optimizer) if distributed else optimizer, "mse",
            metrics=metrics,
        )  # fmt: skip
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        data = zero.shard_dataset(data) if distributed else data
        history = model.fit(
            data, validation_data=data, epochs=2, verbose=0,
            callbacks=[zero.callbacks.MetricAverage()] if distributed else [],
        )  # fmt: skip
        results.append(history.history)
    assert_reported_alike(results[1], results[0])


def test_a_dataset_of_one_sample():
    (got, _), (expected, _) = (fitted(d, lambda: batches(1, False)) for d in (True, False))
    assert_reported_alike(got.history, expected.history)


WAYS = {
    "eager": {"compiled": {"run_eagerly": True}},
    "steps_per_execution": {"compiled": {"steps_per_execution": 2}},
    "class_weight": {"class_weight": {0: 0.3, 1: 2.0, 2: 1.0}},
    "repeated": {"steps_per_epoch": 3},
}


@world.at_two_ranks
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_fit_an_uneven_dataset(way):
    def make():
        data = batches(2 * BATCH + 1, False)
        return data.repeat() if way == "repeated" else data

    (got, ours), (expected, plain) = (fitted(d, make, **WAYS[way]) for d in (True, False))
    assert_reported_alike(got.history, expected.history)
    world.assert_same(world.weights(ours), world.weights(plain), bitwise=False, tolerance=2e-6)


class Length(keras.layers.Layer):
    """Of a vector; its gradient at zero is NaN."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return tf.sqrt(tf.reduce_sum((x * self.scale) ** 2, axis=-1, keepdims=True))


@pytest.mark.skipif(world.SIZE == 1, reason="one rank has all samples")
def test_a_rank_without_samples_leaves_no_trace():
    """Its statistics stay, and gradients that are NaN for lack of samples do no harm."""
    statistics = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((7,)), Length(), statistics])
    model.compile(zero.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    model.fit(zero.shard_dataset(batches(1, False)), verbose=0)
    assert np.any(statistics.moving_mean.numpy()) == (world.RANK == world.SIZE - 1)
    assert all(np.all(np.isfinite(w)) for w in world.weights(model))
    world.assert_ranks_agree(world.weights(model))


class OwnStep(keras.Model):
    """A train_step as in Keras' guides: no loss tracker, no scale_loss."""

    def __init__(self):
        super().__init__()
        self.dense, self.tracker = keras.layers.Dense(1), keras.metrics.Mean(name="own")

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x)[:, 0] - tf.cast(y, tf.float32)) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"own": self.tracker.result(), "last": loss}


@world.at_two_ranks
def test_a_train_step_of_ones_own_on_an_uneven_dataset():
    results = []
    for distributed in (False, True):
        keras.utils.set_random_seed(3)
        model, data = OwnStep(), batches(2 * BATCH + 1, False)
        optimizer = keras.optimizers.SGD(0.01)
        model.compile(zero.DistributedOptimizer(optimizer) if distributed else optimizer)
        history = model.fit(
            zero.shard_dataset(data) if distributed else data, epochs=2, verbose=0,
            callbacks=[zero.callbacks.MetricAverage()] if distributed else [],
        )  # fmt: skip
        results.append([*world.weights(model), np.array(history.history["own"])])
    world.assert_same(results[1], results[0], bitwise=False, tolerance=2e-6)


@world.at_two_ranks
def test_one_trace_for_all_uneven_datasets(monkeypatch):
    traces = []
    _, model = fitted(True, lambda: batches(2 * BATCH + 1, False))
    run = model.optimizer.step.run
    monkeypatch.setattr(model.optimizer.step, "run", lambda *a: (traces.append(1), run(*a)))
    model.fit(zero.shard_dataset(batches(BATCH + 1, False)), verbose=0)
    assert not traces
    x, y, _ = samples(4)
    model.fit(x, y, batch_size=2, verbose=0)  # counts nothing, so that is another step
    model.fit(zero.shard_dataset(batches(BATCH + 1, False)), verbose=0)
    assert len(traces) == 1
    assert not {"train_step", "test_step"} & model.__dict__.keys()


def test_a_loop_over_an_uneven_dataset():
    """One trace, and ranks without samples count as 0 although their loss is NaN."""
    traces, results = [], []
    for distributed in (False, True):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer = zero.DistributedOptimizer(optimizer) if distributed else optimizer
        optimizer.build(model.trainable_variables)

        @tf.function(input_signature=[tf.TensorSpec([None, 7]), tf.TensorSpec([None], tf.int64)])
        def step(x, y, model=model, optimizer=optimizer, distributed=distributed):
            traces.append(distributed)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x)[:, 0] - tf.cast(y, tf.float32)) ** 2)
            if distributed:
                zero.weight(tf.shape(x)[0])
            optimizer.apply(tape.gradient(loss, model.trainable_variables))

        data = batches(2 * BATCH + 1, False)
        for x, y in zero.shard_dataset(data) if distributed else data:
            step(x, y)
        results.append(world.weights(model))
    world.assert_same(results[1], results[0], bitwise=False, tolerance=2e-6)
    assert traces == [False, True]


@pytest.mark.skipif(world.SIZE == 1, reason="needs two ranks")
def test_all_ranks_count_samples_or_none():
    _, model = fitted(False, lambda: batches(1, False))
    model.compile(zero.DistributedOptimizer("sgd"), loss="sparse_categorical_crossentropy")
    data = batches(BATCH + 1, False)
    part = zero.shard_dataset(data)
    with pytest.raises(zero.DisagreementError, match=r"only ranks \[0\]"):
        model.fit(part if world.RANK == 0 else data, verbose=0)


@pytest.mark.skipif(world.SIZE == 1, reason="needs two ranks")
def test_all_ranks_count_samples_or_none_in_a_later_fit_too():
    _, model = fitted(True, lambda: batches(BATCH + 1, False))
    plain, part = batches(BATCH, False), zero.shard_dataset(batches(BATCH + 1, False))
    model.fit(plain, verbose=0)
    with pytest.raises(zero.DisagreementError, match=r"rank 0 .* part from zero.shard_dataset"):
        model.fit(part if world.RANK == 0 else plain, verbose=0)
    model.fit(part, verbose=0)
    world.assert_ranks_agree(world.weights(model))


@pytest.mark.skipif(world.SIZE == 1, reason="one rank has whole batches")
@pytest.mark.parametrize(
    ("stage", "eagerly"),
    [(0, False), (1, False), (2, False), (2, True)] if world.SIZE == 2 else [(1, False)],
)
def test_inputs_outputs_and_losses_by_name(stage, eagerly):
    """Plain Keras counts batches for the losses of outputs, or samples when it runs eagerly."""
    results = []
    x, y, weight = samples(2 * BATCH + 1)
    data = tf.data.Dataset.from_tensor_slices(({"x": x, "w": weight}, {"kind": y, "sum": y % 2}))
    data = data.batch(BATCH)
    for distributed in (False, True):
        keras.utils.set_random_seed(3)
        inputs = {"x": keras.Input((7,), name="x"), "w": keras.Input((), name="w")}
        hidden = keras.layers.Dense(5, "tanh")(inputs["x"]) * inputs["w"][:, None]
        outputs = {
            "kind": keras.layers.Dense(CLASSES, "softmax", name="kind")(hidden),
            "sum": keras.layers.Dense(1, name="sum")(hidden),
        }
        model = keras.Model(inputs, outputs)
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        model.compile(
            zero.DistributedOptimizer(optimizer, stage=stage) if distributed else optimizer,
            loss={"kind": "sparse_categorical_crossentropy", "sum": "mse"},
            loss_weights={"kind": 0.3, "sum": 2.0}, metrics={"kind": "accuracy"},
            run_eagerly=eagerly,
        )  # fmt: skip
        history = model.fit(
            zero.shard_dataset(data) if distributed else data, epochs=2, verbose=0,
            callbacks=[zero.callbacks.MetricAverage()] if distributed else [],
        )  # fmt: skip
        results.append((history.history, world.weights(model)))
    (expected, plain), (got, ours) = results
    assert {"kind_loss", "sum_loss"} <= got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, err_msg=name)
    world.assert_same(ours, plain, bitwise=False, tolerance=1e-5)


@world.at_two_ranks
def test_train_on_batch_takes_the_weight_of_each_call():
    x, y, _ = samples(8)
    results = []
    for distributed in (False, True):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01)
        model.compile(zero.DistributedOptimizer(optimizer) if distributed else optimizer, "mse")
        for cut in (1, 3, 1, 6):
            part = slice(0, 8)
            if distributed:
                part = slice(0, cut) if world.RANK == 0 else slice(cut, 8)
                zero.weight(len(x[part]))
            model.train_on_batch(x[part], y[part].astype("float32"))
        results.append(world.weights(model))
    world.assert_same(results[1], results[0], bitwise=False, tolerance=2e-6)
