"""The most that a Keras step held beyond its gradients, in buckets, per optimizer.

    OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 \\
    python -m zerohvd.launching mpirun -np 2 --bind-to none python benchmarks/keras_memory.py

Names of optimizers (see OPTIMIZERS) choose some of them. TensorFlow's own log of every tensor it
allocates and frees is the witness. Its allocator's statistics are not: they count chunks, which may
be twice as large as what was asked for.
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
MODELS = {"one_bucket_each": (512, 8), "many_in_a_bucket": (256, 32)}
opts = keras.optimizers
REGULARIZED = {
    "l1_regularization_strength": 0.1,
    "l2_regularization_strength": 0.1,
    "l2_shrinkage_regularization_strength": 0.1,
}
OPTIMIZERS = {
    "SGD": lambda: opts.SGD(1e-3),
    "momentum": lambda: opts.SGD(1e-3, momentum=0.9, nesterov=True),
    "RMSprop": lambda: opts.RMSprop(1e-3),
    "RMSprop_centered": lambda: opts.RMSprop(1e-3, centered=True, momentum=0.9),
    "Adam": lambda: opts.Adam(1e-3),
    "amsgrad": lambda: opts.Adam(1e-3, amsgrad=True),
    "AdamW": lambda: opts.AdamW(1e-3),
    "Nadam": lambda: opts.Nadam(1e-3),
    "Adamax": lambda: opts.Adamax(1e-3),
    "Adagrad": lambda: opts.Adagrad(1e-3),
    "Adadelta": lambda: opts.Adadelta(1e-3),
    "Ftrl": lambda: opts.Ftrl(1e-3),
    "Ftrl_regularized": lambda: opts.Ftrl(1e-3, **REGULARIZED),
    "Lion": lambda: opts.Lion(1e-3),
    "clipvalue": lambda: opts.Adam(1e-3, clipvalue=0.1),
    "clipnorm": lambda: opts.Adam(1e-3, clipnorm=0.1),
    "global_clipnorm": lambda: opts.AdamW(1e-3, global_clipnorm=1.0),
    "ema_overwrite": lambda: opts.Adam(1e-3, use_ema=True, ema_overwrite_frequency=1),
    "accumulation": lambda: opts.Adam(1e-3, gradient_accumulation_steps=2),
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
    number, size = (re.compile(p) for p in (r"allocation_id: (\d+)", r"allocated_bytes: (\d+)"))
    with open(LOG.name, errors="replace") as lines:
        for line in lines:
            if line.startswith("@@begin"):
                _, title, gradients = line.split()
                before = peak = held
            elif line.startswith("@@end"):
                beyond = (peak - before - int(gradients)) / BUCKET
                found[title] = max(beyond, found.get(title, -1e9))
                title = None
            elif "__LOG_MEMORY__" in line and (which := number.search(line)):
                if "Deallocation" in line:
                    held -= live.pop(which[1], 0)
                elif "TensorAllocation" in line and (allocated := size.search(line)):
                    live[which[1]] = int(allocated[1])
                    held += live[which[1]]
                peak = max(peak, held) if title else 0
    return found


hvd.init()
for name in sys.argv[1:] or OPTIMIZERS:
    for kind, (width, count) in MODELS.items():
        train(f"{kind}/{name}", width, count, OPTIMIZERS[name])
os.dup2(SPOKEN, 2)
if hvd.rank() == 0:
    for title, beyond in peaks().items():
        print(f"beyond {title} {beyond:.3f}", flush=True)
sys.stdout.flush()
