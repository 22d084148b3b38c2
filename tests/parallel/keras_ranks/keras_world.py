"""What the parallel Keras tests share: a model, data, and plain Keras as the oracle."""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import zerohvd.keras as zero

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
PER_RANK = 4
STEPS = 4


# What does not depend on the number of ranks is tested with 2 of them, everything else with 1-4.
at_two_ranks = pytest.mark.skipif(SIZE != 2, reason="tested with 2 ranks")


def few(cases, kept):
    """All cases with 2 ranks; otherwise those named in `kept`."""
    return [c for c in cases if SIZE == 2 or c in kept.split()]


_rng = np.random.default_rng(0)
X = _rng.normal(size=(STEPS * PER_RANK * SIZE, 7)).astype("float32")
Y = _rng.normal(size=(STEPS * PER_RANK * SIZE, 1)).astype("float32")


def make_model(seed: int = 7, **dense: object) -> keras.Model:
    """Odd sizes, and a bias with fewer elements than there are ranks."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((7,)),
            keras.layers.Dense(33, activation="tanh", **dense),
            keras.layers.Dense(1, **dense),
        ]
    )


def batch(step: int, rank: int = RANK) -> tuple[np.ndarray, np.ndarray]:
    start = (step * SIZE + rank) * PER_RANK
    return X[start : start + PER_RANK], Y[start : start + PER_RANK]


def union(step: int) -> tuple[np.ndarray, np.ndarray]:
    start = step * SIZE * PER_RANK
    return X[start : start + SIZE * PER_RANK], Y[start : start + SIZE * PER_RANK]


def weights(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy().astype("float32") for v in model.trainable_variables]


def loop(model, optimizer, *, reduce, data=batch, steps=STEPS, eager=False, dense=False):
    """A custom loop; `reduce` averages the gradients with plain Horovod first."""
    variables = model.trainable_variables

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(model(x), tf.float32) - y) ** 2)
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, variables)
        if dense:
            grads = [tf.convert_to_tensor(g) for g in grads]
        if reduce:
            grads = [
                hvd.allreduce(g, op=hvd.Average, name=f"plain{i}") for i, g in enumerate(grads)
            ]
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    optimizer.build(variables)
    run = step if eager else tf.function(step)
    for s in range(steps):
        x, y = data(s)
        run(tf.constant(x), tf.constant(y))
    return weights(model)


_answers: dict[tuple, list[np.ndarray]] = {}  # of the oracle, which several tests ask the same


def plain(make_optimizer, model=None, **options):
    """The oracle: plain Keras on gradients that plain Horovod averaged."""
    optimizer = make_optimizer()
    if model is not None or options:
        return loop(model or make_model(), optimizer, reduce=True, **options)
    settings = {k: v for k, v in optimizer.get_config().items() if k != "name"}
    key = (type(optimizer).__name__, repr(settings), keras.config.dtype_policy().name)
    if key not in _answers:
        _answers[key] = loop(make_model(), optimizer, reduce=True)
    return _answers[key]


def sharded(make_optimizer, model=None, stage=2, eager=False, steps=STEPS, **options):
    optimizer = zero.DistributedOptimizer(make_optimizer(), stage=stage, **options)
    model = model or make_model()
    return loop(model, optimizer, reduce=False, eager=eager, steps=steps), optimizer


def assert_same(got, expected, *, bitwise=True, tolerance=1e-6):
    """Equal to the last bit at up to 2 ranks, where sums have one order; else within 1e-6."""
    for g, e in zip(got, expected, strict=True):
        if bitwise and SIZE <= 2:
            np.testing.assert_array_equal(g, e)
        else:
            difference = np.linalg.norm(g - e)
            assert difference <= tolerance * max(np.linalg.norm(e), 1e-3)


def assert_ranks_agree(values):
    for i, v in enumerate(values):
        everyone = hvd.allgather(tf.constant(v)[None], name=f"agree{i}").numpy()
        np.testing.assert_array_equal(everyone, np.broadcast_to(v, everyone.shape))
