"""Step time of Keras at stage 3, with and without recomputation, against stage 2.

    python benchmarks/keras_stage3_time.py --np 2 --rounds 5

The transformer of keras_step_time.py. Every contender has processes of its own in every round; the
contenders of a round follow each other. Of a job the median step counts, of a contender the median
job. `make bench` times plain Horovod and `model.fit` in the same way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from zerohvd.launchers import detect
from zerohvd.launching import launch

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/keras_stage3_time.md"
ENV = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
WAYS = {
    "stage 2": {"stage": 2},
    "stage 3, recompute=False": {"stage": 3, "recompute": False},
    "stage 3": {"stage": 3},
}
# Only with --ways, or in `make bench`.
MORE = {"horovod": {}, "stage 1": {"stage": 1}, "fit, stage 2": {"stage": 2}}
LIMITS = {"stage 3, recompute=False": 1.2, "stage 3": 1.5}
WARM = 3


def rank_main(args: argparse.Namespace) -> None:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf
    from keras_step_time import LOSS, plain, transformer

    import zerohvd.keras as zero

    hvd.init()
    if args.way == "horovod":
        one = plain(transformer, True, 1)
        finish([timed(one) for _ in range(WARM + args.steps)], args)
        return
    model, x, y = transformer()
    how = (WAYS | MORE)[args.way]
    model, opt = zero.zeroify(model, keras.optimizers.Adam(1e-4), **how)
    if args.way.startswith("fit"):
        finish(in_fit(model, opt, LOSS, x, y, WARM + args.steps), args)
        return
    variables = model.trainable_variables

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        opt.apply(tape.gradient(loss, variables), variables)
        return loss

    x, y = tf.constant(x), tf.constant(y)
    finish([timed(lambda: step(x, y).numpy()) for _ in range(WARM + args.steps)], args)


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_fit(model, opt, loss, x, y, steps: int) -> list[float]:
    """Seconds of each step of model.fit."""
    import keras
    import tensorflow as tf

    ends: list[float] = []

    class Times(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            ends.append(time.perf_counter())

    model.compile(opt, loss=loss)
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    model.fit(data, steps_per_epoch=steps + 1, epochs=1, verbose=0, callbacks=[Times()])
    return [b - a for a, b in itertools.pairwise(ends)]


def finish(seconds: list[float], args: argparse.Namespace) -> None:
    import horovod.tensorflow as hvd

    if hvd.rank() == 0:
        args.result.write_text(json.dumps(statistics.median(seconds[WARM:])))


def job(way: str, args: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        argv = [sys.executable, __file__, f"--way={way}", f"--steps={args.steps}"]
        done = launch(args.np, [*argv, f"--result={result}"], timeout=1200, env=ENV)
        if not result.exists():
            raise SystemExit(done.explain())
        return float(json.loads(result.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    for name, kind in (("--way", str), ("--result", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if detect(os.environ).launched:
        rank_main(args)
        return
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way, times in found.items():
            times.append(job(way, args))
            print(f"round {number}, {way}: {1e3 * times[-1]:.0f} ms", flush=True)
    write(found, args)


def write(found: dict[str, list[float]], args: argparse.Namespace) -> None:
    base = statistics.median(found["stage 2"])
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    lines = [
        f"## {args.np} ranks",
        "",
        f"`python benchmarks/keras_stage3_time.py --np {args.np} --rounds {args.rounds} --steps "
        f"{args.steps}` on {os.cpu_count()} cores ({platform.machine()}), load {load} at the end.",
        "",
        "| | ms per step, median | of stage 2 | at most | all rounds |",
        "|---|---|---|---|---|",
    ]
    for way, times in found.items():
        middle = statistics.median(times)
        rounds = ", ".join(f"{1e3 * t:.0f}" for t in times)
        limit = LIMITS.get(way, "")
        lines.append(f"| {way} | {1e3 * middle:.0f} | {middle / base:.2f} | {limit} | {rounds} |")
    text = "\n".join(lines) + "\n\n"
    print(text)
    before = RESULT.read_text() if RESULT.exists() else "# Step time of Keras at stage 3\n\n"
    parts = [p for p in before.split("## ") if not p.startswith(f"{args.np} ranks")]
    RESULT.write_text("## ".join([*parts, text.removeprefix("## ")]))


if __name__ == "__main__":
    main()
