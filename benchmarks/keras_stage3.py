"""Keras at stage 3: what a rank holds between steps, what is gathered at once, what is moved.

    OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 \\
    python -m zerohvd.launching mpirun -np 2 --bind-to none python benchmarks/keras_stage3.py

A transformer of 12 blocks under Adam. TensorFlow's own log of every tensor that a step allocates
and frees is the witness of what is gathered; see keras_memory.py. It has no line for what is
allocated outside of a graph, as first values are: variables are counted by their shapes.
"""

import argparse
import math
import os
import re
import sys
import tempfile
import traceback

LOG = tempfile.NamedTemporaryFile()  # noqa: SIM115 - the log lives as long as the process
os.environ["TF_CPP_VMODULE"] = "log_memory=2"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
SPOKEN = os.dup(2)
os.dup2(LOG.fileno(), 2)
# Or nobody would learn of an error: standard error is the log.
sys.excepthook = lambda *error: os.write(
    SPOKEN, "".join(traceback.format_exception(*error)).encode()
)

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import zerohvd.keras as zero  # noqa: E402

WIDTH, BLOCKS, VOCABULARY, LENGTH = 128, 12, 512, 16
# Horovod's name of an operation that gathers a unit, in forward or backward.
GATHER = re.compile(r'kernel_name: "[^"]*zero[^"]*\.u(\d+)\.\d+\.(forward|backward)\d')


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.attention = keras.layers.MultiHeadAttention(4, WIDTH // 4)
        self.up = keras.layers.Dense(4 * WIDTH, activation="relu")
        self.down = keras.layers.Dense(WIDTH)

    def build(self, shape):
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed)
        return x + self.down(self.up(self.norms[1](x)))


def transformer():
    keras.utils.set_random_seed(1)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(BLOCKS):
        x = Block()(x)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))


def mark(text):
    os.write(LOG.fileno(), f"\n@@{text}\n".encode())


def read_log():
    """Bytes at most gathered at once, how many units that was, and bytes that a step adds."""
    live, gathers, held, between = {}, {}, 0, 0
    most_gathered, most_units, peak, running = 0, 0, 0, False
    number, size = (re.compile(p) for p in (r"allocation_id: (\d+)", r"allocated_bytes: (\d+)"))
    with open(LOG.name, errors="replace") as lines:
        for line in lines:
            if line.startswith("@@begin"):
                running, between = True, held
            elif line.startswith("@@end"):
                running = False
            elif "__LOG_MEMORY__" in line and (which := number.search(line)):
                if "Deallocation" in line:
                    held -= live.pop(which[1], 0)
                    gathers.pop(which[1], None)
                elif "TensorAllocation" in line and (allocated := size.search(line)):
                    live[which[1]] = int(allocated[1])
                    held += live[which[1]]
                    if unit := GATHER.search(line):
                        gathers[which[1]] = (int(allocated[1]), unit[1])
                if running:
                    peak = max(peak, held - between)
                    most_gathered = max(most_gathered, sum(b for b, _ in gathers.values()))
                    most_units = max(most_units, len({u for _, u in gathers.values()} - {"0"}))
    return most_gathered, most_units, peak


def pieces(model):
    """What stores the model's variables on this rank."""
    return [v.zero_shard.piece if hasattr(v, "zero_shard") else v.value for v in model.variables]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", action="store_true", help="recompute=False")
    args = parser.parse_args()
    hvd.init()
    model, opt = zero.zeroify(
        transformer(), keras.optimizers.Adam(1e-3), stage=3, recompute=not args.keep
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    psi = model.count_params()
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        opt.apply(tape.gradient(value, variables), variables)

    x = tf.constant(np.random.default_rng(hvd.rank()).integers(0, VOCABULARY, (2, LENGTH)))
    step(x, x)
    for _ in range(3):
        mark("begin")
        step(x, x)
        mark("end")
    moved = zero.communication_report(opt)["total"].bytes
    held = sum(math.prod(v.shape) * 4 for v in (*pieces(model), *opt.variables))
    if hvd.rank():
        return
    gathered, at_once, peak = read_log()
    units = [sum(b.nbytes for b in u.buckets) for u in opt.sharded.units.all]
    n = hvd.size()
    print(f"| ranks | {n} |")
    print(f"| parameters | {psi / 1e6:.2f} M |")
    share = 12 * psi / n
    print(f"| variables of model and optimizer / 12Ψ/N | {held / share:.3f} |")
    print(f"| units gathered at once, besides the root | {at_once} |")
    print(f"| gathered at once / (root + 2 units) | {gathered / (units[0] + 2 * units[1]):.3f} |")
    print(f"| most held in a step, beyond the variables / 4Ψ | {peak / (4 * psi):.3f} |")
    print(f"| moved per step / (3(N-1)/N 4Ψ) | {moved / max(1, 12 * psi * (n - 1) / n):.3f} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
