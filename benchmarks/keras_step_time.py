"""Step time of `model.fit` with ZeRO against plain Horovod in a custom loop, in one run.

    OMPI_MCA_mpi_yield_when_idle=1 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1 \\
    mpirun -np 2 --bind-to none python benchmarks/keras_step_time.py

Plain Horovod averages every gradient with `horovod.tensorflow` and applies the plain Keras
optimizer, all in one tf.function; both of its ways (single and grouped allreduce) are timed and
the faster one counts. Rounds of the contestants alternate, and the ratio is taken per round, so
that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import zerohvd.keras as zero


def mlp():
    keras.utils.set_random_seed(1)
    sizes = [2048] * 6
    layers = [keras.layers.Dense(n, activation="relu") for n in sizes]
    model = keras.Sequential([keras.layers.Input((1024,)), *layers, keras.layers.Dense(1000)])
    x = np.random.default_rng(hvd.rank()).normal(size=(16, 1024)).astype("float32")
    return model, x, np.arange(16) % 1000


def transformer(vocabulary=16000, width=384, blocks=6, length=32):
    keras.utils.set_random_seed(1)
    tokens = keras.Input((length,), dtype="int32")
    h = keras.layers.Embedding(vocabulary, width)(tokens)
    for _ in range(blocks):
        a = keras.layers.LayerNormalization()(h)
        h = h + keras.layers.MultiHeadAttention(6, width // 6)(a, a)
        f = keras.layers.LayerNormalization()(h)
        f = keras.layers.Dense(4 * width, activation="relu")(f)
        h = h + keras.layers.Dense(width)(f)
    model = keras.Model(tokens, keras.layers.Dense(vocabulary)(h))
    rng = np.random.default_rng(hvd.rank())
    x = rng.integers(0, vocabulary, size=(2, length)).astype("int32")
    return model, x, np.roll(x, -1, 1)


def barrier():
    hvd.allreduce(tf.zeros([1]), name="barrier")


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def plain(make, grouped, steps):
    model, x, y = make()
    optimizer = keras.optimizers.Adam(1e-4)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        grads = tape.gradient(loss, variables)
        if grouped:  # knows no sparse gradients
            grads = [tf.convert_to_tensor(g) for g in grads]
            grads = hvd.grouped_allreduce(grads, op=hvd.Average, name="plain_group")
        else:
            grads = [hvd.allreduce(g, op=hvd.Average, name=f"p{i}") for i, g in enumerate(grads)]
        optimizer.apply(grads, variables)
        return loss

    x, y = tf.constant(x), tf.constant(y)

    def run():
        for _ in range(steps):
            loss = step(x, y)
        return float(loss)

    return run


def sharded(make, stage, steps):
    model, x, y = make()
    model.compile(
        optimizer=zero.DistributedOptimizer(keras.optimizers.Adam(1e-4), stage=stage), loss=LOSS
    )
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    # One iterator for all rounds: `fit` builds a new one per call, which is not the step's time.
    times = Times(steps)

    def run():
        model.fit(data, steps_per_epoch=steps + 1, epochs=1, verbose=0, callbacks=[times])
        return times.seconds

    run.parameters = model.count_params()
    return run


class Times(keras.callbacks.Callback):
    """Seconds for the last `steps` steps of an epoch; the first one also starts the iterator."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            barrier()
            self.start = time.perf_counter()
        if batch == self.steps:
            self.seconds = time.perf_counter() - self.start


def timed(run):
    barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(make, rounds, steps):
    single, grouped = plain(make, False, steps), plain(make, True, steps)
    ours = sharded(make, 2, steps)
    for run in (single, grouped, ours):
        run()
    rows = []
    for _ in range(rounds):
        a, b, c = timed(single), timed(grouped), ours()
        rows.append([1e3 * t / steps for t in (a, b, c)])
    return ours.parameters, np.array(rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=["mlp", "transformer"])
    args = parser.parse_args()
    hvd.init()
    for name in args.models:
        numel, rows = compare(globals()[name], args.rounds, args.steps)
        medians = np.median(rows, axis=0)
        best = int(np.argmin(medians[:2]))
        ratio = statistics.median(rows[:, 2] / rows[:, best])
        if hvd.rank() == 0:
            single, grouped, ours = medians
            print(
                f"| {name} | {numel / 1e6:.1f} M | {single:.0f} | {grouped:.0f} | {ours:.0f} | "
                f"{ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
