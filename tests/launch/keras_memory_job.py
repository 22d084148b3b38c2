"""Print, per optimizer, the most that a step held beyond its gradients, in buckets.

TensorFlow's own log of every tensor it allocates and frees is the witness. Its allocator's
statistics are not: they count chunks, which may be twice as large as what was asked for.
"""

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

BUCKET = 1 << 20
STEPS = 3
MODELS = {"one_bucket_each": (512, 10), "many_in_a_bucket": (256, 40)}
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3),
    "global_clipnorm": lambda: keras.optimizers.AdamW(1e-3, global_clipnorm=1.0),
}


def mark(text):
    os.write(LOG.fileno(), f"\n@@{text}\n".encode())


def train(title, width, count, make):
    layers = [keras.layers.Dense(width) for _ in range(count)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    optimizer = zero.DistributedOptimizer(make(), bucket_bytes=BUCKET)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)

    x = tf.ones([2, width])
    step(x)
    gradients = sum(4 * int(np.prod(v.shape)) for v in variables)
    for _ in range(STEPS):
        mark(f"begin {title} {gradients}")
        step(x)
        mark("end")


def peaks():
    """The largest of the steps, by title."""
    live, held, found, title = {}, 0, {}, None
    with open(LOG.name, errors="replace") as lines:
        for line in lines:
            if line.startswith("@@begin"):
                _, title, gradients = line.split()
                before = peak = held
            elif line.startswith("@@end"):
                beyond = (peak - before - int(gradients)) / BUCKET
                found[title] = max(beyond, found.get(title, -1e9))
                title = None
            elif "__LOG_MEMORY__" in line and (number := re.search(r"allocation_id: (\d+)", line)):
                size = re.search(r"allocated_bytes: (\d+)", line)
                if "TensorAllocation" in line and size:
                    live[number[1]] = int(size[1])
                    held += int(size[1])
                elif "Deallocation" in line:
                    held -= live.pop(number[1], 0)
                peak = max(peak, held) if title else 0
    return found


hvd.init()
for kind, (width, count) in MODELS.items():
    for name, make in OPTIMIZERS.items():
        train(f"{kind}/{name}", width, count, make)
os.dup2(SPOKEN, 2)
if hvd.rank() == 0:
    for title, beyond in peaks().items():
        print(f"beyond {title} {beyond:.3f}", flush=True)
sys.stdout.flush()
