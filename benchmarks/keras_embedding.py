"""An embedding of 1 GiB at stage 3 when every rank may use 2 GiB.

    TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=2 \\
    python -m zerohvd.launching mpirun -np 2 --bind-to none python benchmarks/keras_embedding.py

RLIMIT_DATA counts what a rank writes to and shares with nobody, about 0.55 GiB of which TensorFlow
and Horovod take before there is a model. Adam's table and moments would be 1.5 GiB of two ranks'
2 GiB each: it needs three.
"""

import argparse
import resource
import time
from pathlib import Path

ROWS, WIDTH, LENGTH, BATCH = 1 << 20, 256, 16, 64


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) >> 10


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit-mib", type=int, default=2048)
    parser.add_argument("--optimizer", default="adagrad")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (args.limit_mib << 20,) * 2)
    import horovod.tensorflow as hvd
    import keras
    import numpy as np

    import zerohvd.keras as zero

    hvd.init()
    start = status("VmData")
    keras.utils.set_random_seed(0)
    with zero.deferred_init():
        tokens = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(ROWS, WIDTH)(tokens))
        model = keras.Model(tokens, keras.layers.Dense(2)(x))
    optimizer = {"class_name": args.optimizer, "config": {"learning_rate": 1e-2}}
    model, opt = zero.zeroify(model, keras.optimizers.get(optimizer), stage=3)
    model.compile(optimizer=opt, loss="mse")
    made = status("VmData")
    rng, losses, seconds = np.random.default_rng(hvd.rank()), [], []
    x, y = rng.integers(0, ROWS, (BATCH, LENGTH)), np.ones((BATCH, 2), "float32")
    for _ in range(6):
        began = time.perf_counter()
        losses.append(model.train_on_batch(x, y))
        seconds.append(time.perf_counter() - began)
    moved = zero.communication_report(opt)["total"].bytes
    if hvd.rank() == 0:
        print(f"| ranks, optimizer | {hvd.size()}, {args.optimizer} |")
        print(f"| RLIMIT_DATA, MiB | {args.limit_mib} |")
        print(f"| table, MiB | {ROWS * WIDTH >> 18} |")
        print(f"| private memory of rank 0: at the start, sharded, trained, MiB | {start}, {made}, "
              f"{status('VmData')} |")
        print(f"| resident at most, MiB | {status('VmHWM')} |")
        print(f"| moved per step, MiB | {moved / 2**20:.2f} |")
        print(f"| rows of a batch, MiB | {BATCH * LENGTH * WIDTH * 4 / 2**20:.2f} |")
        print(f"| a step, s | {sorted(seconds)[2]:.2f} |")
        print(f"| loss | {losses[0]:.4f} -> {losses[-1]:.4f} |")


if __name__ == "__main__":
    main()
