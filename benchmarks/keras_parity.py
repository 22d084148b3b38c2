"""How far a run with ZeRO lies from plain Keras, per optimizer, after ten steps.

    python -m zerohvd.launching mpirun -np 2 --bind-to none python benchmarks/keras_parity.py

Three runs: plain Keras in one process on the union of the batches, plain Keras on gradients that
plain Horovod averaged, and ZeRO stage 2. Printed is |a - b| / |b|, of all variables taken as one
vector, and in parentheses of the one variable where it is largest. Where the first two differ as
much as the first and the last, the difference is the order in which samples are added up, and none
of ZeRO's.
"""

from __future__ import annotations

import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import zerohvd.keras as zero

STEPS, PER_RANK = 10, 8
NAMES = "SGD RMSprop Adam AdamW Nadam Adamax Adagrad Adadelta Ftrl Lion Adafactor Lamb Muon"


def data(step, rank=None):
    """Of one rank, or of all of them."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(PER_RANK * hvd.size(), 64)).astype("float32")
    y = np.tanh(x[:, :1] - x[:, 1:2])
    cut = slice(None) if rank is None else slice(rank * PER_RANK, (rank + 1) * PER_RANK)
    return tf.constant(x[cut]), tf.constant(y[cut])


def train(name, way):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(n, "tanh") for n in (257, 129)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)])
    optimizer = getattr(keras.optimizers, name)(learning_rate=1e-3)
    if way == "zero":
        optimizer = zero.DistributedOptimizer(optimizer, stage=2, bucket_bytes=1 << 16)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = tape.gradient(loss, variables)
        if way == "horovod":
            grads = [hvd.allreduce(g, op=hvd.Average, name=f"g{i}") for i, g in enumerate(grads)]
        optimizer.apply(grads, variables)

    for number in range(STEPS):
        step(*data(number, None if way == "union" else hvd.rank()))
    return [v.numpy().astype("float64") for v in variables]


def distance(a, b):
    """As a whole, and of the variable that is farthest off; each relative to its norm in `b`."""
    whole = [np.concatenate([v.ravel() for v in side]) for side in (a, b)]
    each = [np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(a, b, strict=True)]
    return np.linalg.norm(whole[0] - whole[1]) / np.linalg.norm(whole[1]), max(each)


def shown(found):
    return "bitwise" if found[1] == 0 else f"{found[0]:.1e} ({found[1]:.1e})"


hvd.init()
if hvd.rank() == 0:
    print(f"| {hvd.size()} ranks | ZeRO to Horovod | ZeRO to union | Horovod to union |")
    print("|---|---|---|---|")
for name in sys.argv[1:] or NAMES.split():
    union, plain, sharded = (train(name, way) for way in ("union", "horovod", "zero"))
    pairs = [(sharded, plain), (sharded, union), (plain, union)]
    if hvd.rank() == 0:
        print(f"| {name} | {' | '.join(shown(distance(*p)) for p in pairs)} |", flush=True)
