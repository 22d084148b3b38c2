"""The largest Keras transformer that trains when every rank may use only so much memory.

    python benchmarks/keras_largest_model.py --np 4 --limit-mib 2048

Two contenders, in the same loop with the same optimizer: plain Keras whose gradients Horovod
averages, and stage 3. How they are compared, and what the limit counts, is said in
largest_model.py.

TF_ENABLE_ONEDNN_OPTS=0 for both: with oneDNN, TensorFlow takes memory in regions, each twice as
large as the one before, and what a limit stops is the size of a region that is hardly used.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
from pathlib import Path

import largest_model as search

from zerohvd.launchers import detect

RESULT = search.ROOT / "benchmarks/results/keras_largest_model.md"
ENV = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
ENV |= {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}


def block_class(keras, dim):
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
            self.attention = keras.layers.MultiHeadAttention(dim // 64, 64)
            self.up = keras.layers.Dense(4 * dim, activation="relu")
            self.down = keras.layers.Dense(dim)

        def build(self, shape):
            for norm in self.norms:
                norm.build(shape)
            self.attention.build(shape, shape)
            self.up.build(shape)
            self.down.build((*shape[:-1], 4 * dim))

        def call(self, x):
            normed = self.norms[0](x)
            x = x + self.attention(normed, normed)
            return x + self.down(self.up(self.norms[1](x)))

    return Block


def transformer(keras, args):
    keras.utils.set_random_seed(0)
    block = block_class(keras, args.dim)
    tokens = keras.Input((args.length,), dtype="int32")
    x = keras.layers.Embedding(256, args.dim)(tokens)
    for _ in range(args.layers):
        x = block()(x)
    return keras.Model(tokens, keras.layers.Dense(256)(x))


def rank_main(args: argparse.Namespace) -> None:
    limit = args.limit_mib << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import horovod.tensorflow as hvd
    import keras
    import numpy as np
    import tensorflow as tf

    if args.way != "horovod":  # Horovod on its own is as it comes
        import zerohvd.keras as zero

    hvd.init()
    before = search.resident("VmRSS")
    opt = keras.optimizers.Adam(1e-4)
    if args.way == "horovod":
        model = transformer(keras, args)
        hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
        opt.build(model.trainable_variables)
    else:
        with zero.deferred_init():
            model = transformer(keras, args)
        model, opt = zero.zeroify(model, opt, stage=3)
    variables = model.trainable_variables
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        grads = tape.gradient(loss, variables)
        if args.way == "horovod":
            grads = [hvd.allreduce(g, op=hvd.Average, name=f"g{i}") for i, g in enumerate(grads)]
        opt.apply(grads, variables)
        return loss

    rng, losses = np.random.default_rng(hvd.rank()), []
    for _ in range(search.STEPS):
        x = tf.constant(rng.integers(0, 256, (1, args.length)), tf.int32)
        losses.append(float(hvd.allreduce(step(x, x), name="loss")))
    highest = tf.constant([search.resident("VmHWM") - before])
    peak = hvd.allreduce(highest, op=hvd.Max, name="peak")
    if hvd.rank() == 0:
        found = {"params": model.count_params(), "losses": losses, "peak": int(peak[0])}
        args.result.write_text(json.dumps(found))


def main() -> None:
    args = search.arguments(__doc__.splitlines()[0], "horovod;zero-3", "8;32")
    if detect(os.environ).launched:
        rank_main(args)
        return
    args.script, args.env = Path(__file__), ENV
    head = "Transformer in Keras, float32, Adam"
    search.compare(args, RESULT, head)


if __name__ == "__main__":
    main()
