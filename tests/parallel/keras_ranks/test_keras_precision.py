"""Loss scaling that ranks agree on, 16-bit variables, sparse gradients."""

import keras
import keras_world as world
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero

LAST = world.SIZE - 1


def scaled(inner):
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0, dynamic_growth_steps=2)


WRAPPED = {
    "inside": lambda: zero.DistributedOptimizer(scaled(keras.optimizers.Adam(0.01))),
    "outside": lambda: scaled(zero.DistributedOptimizer(keras.optimizers.Adam(0.01))),
    "whole": lambda: zero.DistributedOptimizer(scaled(keras.optimizers.Lamb(0.01))),
    "accumulating": lambda: zero.DistributedOptimizer(
        scaled(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)), stage=1
    ),
}


def loss_scale(optimizer):
    scaler = getattr(optimizer, "scaler", None) or optimizer
    return float(scaler.dynamic_scale)


@pytest.mark.parametrize("how", world.few(WRAPPED, "inside accumulating"))
def test_overflow_on_one_rank_is_skipped_by_all(how):
    model, optimizer = world.make_model(), WRAPPED[how]()
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step(poison):
        x, y = world.batch(0)
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean((model(x) - y) ** 2))
        grads = tape.gradient(loss, variables)
        grads[0] += poison
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    step(tf.constant(0.0))
    before, scale = world.weights(model), loss_scale(optimizer)
    step(tf.constant(np.inf if world.RANK == LAST else 0.0, tf.float32))
    for now, then in zip(world.weights(model), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert loss_scale(optimizer) == scale / 2
    assert int(optimizer.iterations) == (0 if how == "accumulating" else 1)
    for _ in range(3):
        step(tf.constant(0.0))
    assert loss_scale(optimizer) == scale
    assert any(not np.array_equal(a, b) for a, b in zip(world.weights(model), before, strict=True))
    world.assert_ranks_agree(world.weights(model))


@pytest.mark.parametrize("wrapped", world.few(["by_compile", "by_hand"], "by_compile"))
def test_mixed_float16_in_fit(wrapped):
    with _policy("mixed_float16"):
        model = world.make_model()
    inner = keras.optimizers.Adam(0.01)
    optimizer = zero.DistributedOptimizer(scaled(inner) if wrapped == "by_hand" else inner)
    model.compile(optimizer=optimizer, loss="mse")
    x, y = world.batch(0)
    model.fit(x, y, epochs=3, batch_size=world.PER_RANK, verbose=0)
    world.assert_ranks_agree(world.weights(model))
    assert int(optimizer.iterations) + _skipped(model.optimizer) == 3
    assert np.isfinite(world.weights(model)[0]).all()


def _skipped(optimizer):
    start = (getattr(optimizer, "scaler", None) or optimizer).initial_scale
    return max(0, int(np.log2(start / min(start, loss_scale(optimizer)))))


class _policy:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.name)

    def __exit__(self, *_):
        keras.config.set_dtype_policy(self.before)


@world.at_two_ranks
def test_mixed_bfloat16():
    with _policy("mixed_bfloat16"):
        got, _ = world.sharded(lambda: keras.optimizers.Adam(0.01))
        expected = world.plain(lambda: keras.optimizers.Adam(0.01))
    world.assert_same(got, expected)


@pytest.mark.parametrize("dtype", world.few(["bfloat16", "float16"], "bfloat16"))
def test_16_bit_variables_have_float32_masters(dtype):
    """Steps far below the resolution of the variable still add up."""
    variable = keras.Variable(np.ones(37, "float32"), dtype=dtype, name="w")
    # 1e-4 is lost in 1.0 at 16 bits; 100 of them are not.
    optimizer = zero.DistributedOptimizer(keras.optimizers.SGD(1e-4))
    step = tf.function(lambda: optimizer.apply([tf.ones(37, variable.dtype)], [variable]))
    optimizer.build([variable])
    for _ in range(100):
        step()
    np.testing.assert_allclose(variable.numpy().astype("float32"), 0.99, atol=0.004)
    report = zero.memory_report(optimizer)
    assert report["params"] == 37 * 2
    own = sum(p.piece.param_span.length for p in optimizer.step.pieces)
    assert report["master"] == 4 * own
    if world.SIZE > 1:
        padded = optimizer.step.layout.buckets[0].padded
        moved = zero.communication_report(optimizer)["reducescatter"].bytes
        assert moved == 2 * padded * (world.SIZE - 1) // world.SIZE
    # Weights that someone sets are the truth, not the old master.
    variable.assign(np.full(37, 2.0, "float32"))
    step()
    np.testing.assert_allclose(variable.numpy().astype("float32"), 2.0, atol=0.01)


@world.at_two_ranks
def test_reduce_dtype_halves_the_gradient_volume():
    got, optimizer = world.sharded(lambda: keras.optimizers.SGD(0.1), reduce_dtype="bfloat16")
    world.assert_same(
        got, world.plain(lambda: keras.optimizers.SGD(0.1)), bitwise=False, tolerance=5e-2
    )
    if world.SIZE > 1:
        report = zero.communication_report(optimizer)
        assert 2 * report["reducescatter"].bytes == report["allgather"].bytes


def embedding_model(rows):
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.layers.Input((3,), dtype="int32"),
            keras.layers.Embedding(rows, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


TABLES = {"large": (997, 2), "large_stage_0": (997, 0), "small": (11, 2)}


@pytest.mark.parametrize("table", world.few(TABLES, "large"))
def test_sparse_gradients(table):
    """Rows travel where the table is large, the table where it is small."""
    rows, stage = TABLES[table]
    rng = np.random.default_rng(1)
    ids = rng.integers(0, rows, size=(world.STEPS, world.SIZE, 6, 3)).astype("int32")
    target = rng.normal(size=(6, 1)).astype("float32")

    def data(step):
        return ids[step, world.RANK], target

    def make():
        return keras.optimizers.Adam(0.01)

    model, optimizer = embedding_model(rows), zero.DistributedOptimizer(make(), stage=stage)
    got = world.loop(model, optimizer, reduce=False, data=data)

    def dense_data(step):
        return ids[step].reshape(-1, 3), np.tile(target, (world.SIZE, 1))

    # Plain Keras squares rows of the same index one by one; the dense gradient is the truth.
    alone = world.loop(embedding_model(rows), make(), reduce=False, data=dense_data, dense=True)
    world.assert_same(got, alone, bitwise=False, tolerance=2e-5)
    world.assert_ranks_agree(got)
    if world.SIZE == 1:
        return
    log = optimizer.step.wire.traffic.log()
    rows_sent = [r for r in log.records if r.name.endswith("/values")]
    assert bool(rows_sent) == (rows == 997)
    if rows_sent:
        assert rows_sent[0].moved == 6 * 3 * 5 * 4 * (world.SIZE - 1)


@world.at_two_ranks
def test_occurrences_of_a_row_are_added_up_before_they_are_squared():
    """As in the dense gradient; plain Keras squares, clips and compares each of them by itself."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 6, size=(world.STEPS, world.SIZE, 6, 3)).astype("int32")
    target = rng.normal(size=(6, 1)).astype("float32")

    def mine(step):
        return ids[step, world.RANK], target

    def union(step):
        return ids[step].reshape(-1, 3), np.tile(target, (world.SIZE, 1))

    alike = [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    ]
    different = [
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.Adamax(0.01),
        lambda: keras.optimizers.Ftrl(0.1),
        lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    ]
    for stage, make in [(s, m) for s in (0, 2) for m in (*alike, *different)]:
        ours = zero.DistributedOptimizer(make(), stage=stage)
        got = world.loop(embedding_model(50), ours, reduce=False, data=mine, eager=True)
        plain = {"reduce": False, "data": union, "eager": True}
        dense = world.loop(embedding_model(50), make(), dense=True, **plain)
        world.assert_same(got, dense, bitwise=False, tolerance=2e-5)
        by_occurrence = world.loop(embedding_model(50), make(), **plain)
        distance = np.abs(by_occurrence[0] - dense[0]).max()
        assert (distance < 1e-6) == (make in alike), ours.name  # docs/keras-parity.md says so


@world.at_two_ranks
def test_rows_of_large_tables_and_of_any_name(monkeypatch):
    """A table beyond the size at which variables are cut, and one that the gradient gives away."""
    from zerohvd.training import graph

    monkeypatch.setattr(graph, "_CHUNK_BYTES", 1024)
    monkeypatch.setattr(graph, "_LEAST_PART_BYTES", 1024)  # what a rank owns has several parts
    tables = [tf.Variable(tf.ones([997, 5]), name=n) for n in ("embeddings", "words")]
    other = tf.Variable(tf.ones([3000]), name="other")
    optimizer = zero.DistributedOptimizer(keras.optimizers.SGD(1.0), bucket_bytes=1024)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            rows = [tf.reduce_sum(tf.gather(t, ids)) for t in tables]
            loss = tf.add_n(rows) + tf.reduce_sum(other)
        variables = [*tables, other]
        optimizer.apply(tape.gradient(loss, variables), variables)

    step(tf.constant([world.RANK, 5, 5]))
    for table in tables:
        expected = np.ones([997, 5])
        expected[: world.SIZE] -= 1 / world.SIZE
        expected[5] -= 2
        np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)
    sent = [r.name for r in optimizer.step.wire.traffic.log().records]
    assert sum(n.endswith("/values") for n in sent) == 2
