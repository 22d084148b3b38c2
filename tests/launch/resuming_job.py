"""A training that goes on from a checkpoint, at whatever number of ranks it is started with.

    mpirun -np N python resuming_job.py FRAMEWORK STAGE STOP FOLDER [kill]

Trains up to step STOP on batches that are the same whatever N is, saves, and prints the losses of
its steps as JSON. With "kill", saves all the time until somebody kills it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

SAMPLES = 12  # of a step, all ranks together


def data(step: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(step).normal(size=(SAMPLES, 9)).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True)).astype("float32")
    return x[rank::size], y[rank::size]


def torch_job(stage: int):
    import horovod.torch as hvd
    import torch

    import zerohvd.torch as zero

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(9, 31), torch.nn.Tanh(), torch.nn.Linear(31, 31), torch.nn.Tanh(),
        torch.nn.Linear(31, 1),
    )  # fmt: skip
    model, opt = zero.zeroify(net, torch.optim.AdamW(net.parameters(), lr=1e-2), stage=stage)

    def step(number: int) -> float:
        x, y = map(torch.from_numpy, data(number, hvd.rank(), hvd.size()))
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        return hvd.allreduce(loss.detach(), name="loss").item()

    return zero, hvd, model, opt, step


def keras_job(stage: int):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    import zerohvd.keras as zero

    hvd.init()
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((9,)), dense(31, "tanh"), dense(31, "tanh"), dense(1)])
    opt = zero.DistributedOptimizer(keras.optimizers.AdamW(1e-2), stage=stage)
    opt.build(model.trainable_variables)

    def step(number: int) -> float:
        x, y = data(number, hvd.rank(), hvd.size())
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return float(hvd.allreduce(loss, name="loss"))

    return zero, hvd, model, opt, step


def main() -> None:
    framework, stage, stop, folder = sys.argv[1:5]
    zero, hvd, model, opt, step = {"torch": torch_job, "keras": keras_job}[framework](int(stage))
    if "kill" in sys.argv:
        manager = zero.CheckpointManager(folder, keep=2, asynchronous="async" in sys.argv)
        done = (manager.restore(model, opt) or {"step": 0})["step"]
        Path(f"{folder}.pids").mkdir(exist_ok=True)
        Path(f"{folder}.pids", str(os.getpid())).touch()
        while True:
            done += 1
            step(done)
            manager.save(done, model, opt, extra={"step": done})
    done = zero.load(Path(folder, "last"), model, opt)["step"] if Path(folder).exists() else 0
    losses = [step(number) for number in range(done, int(stop))]
    zero.save(Path(folder, "last"), model, opt, extra={"step": int(stop)})
    if hvd.rank() == 0:
        print("losses", json.dumps(losses))


if __name__ == "__main__":
    main()
