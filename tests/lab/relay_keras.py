"""python relay_keras.py FOLDER STOP, under any launcher; `plain STEPS`: without Horovod."""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import relay
import tensorflow as tf


def net() -> keras.Model:
    keras.utils.set_random_seed(0)
    dense, width = keras.layers.Dense, relay.WIDTH
    return keras.Sequential(
        [keras.Input((9,)), dense(width, "tanh"), dense(width, "tanh"), dense(1)]
    )


def train(model: keras.Model, opt: keras.Optimizer, x, y) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    return loss


def plain(steps: int) -> list[float]:
    """Losses of plain Keras on the whole batch."""
    model, opt = net(), keras.optimizers.AdamW(1e-2)
    return [float(train(model, opt, *relay.data(number))) for number in range(steps)]


def main() -> None:
    import horovod.tensorflow as hvd

    import zerohvd.keras as zero

    hvd.init()

    def make(stage):
        opt = keras.optimizers.AdamW(1e-2)
        model, opt = zero.zeroify(net(), opt, stage=stage, bucket_bytes=2048)
        opt.build(model.trainable_variables)

        def step(number: int) -> float:
            loss = train(model, opt, *relay.data(number, hvd.rank(), hvd.size()))
            return float(hvd.allreduce(loss, name="loss"))

        return model, opt, step

    relay.run(make, zero, hvd)


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        print(json.dumps(plain(int(sys.argv[2]))))
    else:
        main()
