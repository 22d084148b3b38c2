"""What zero.Monitor and a trace add to a step: rounds with and without, in the same processes.

    mpirun -np 2 --bind-to none python benchmarks/monitor_overhead.py

Blocks of steps alternate in one run on the GPT of torch_step_time.py, as what is measured is
smaller than the difference between two runs. Of each pair of blocks, the ratio counts; the result
is the median over pairs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import zerohvd.torch as zero

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/monitor_overhead.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12, help="of blocks, with and without")
    parser.add_argument("--steps", type=int, default=10, help="in a block: one record")
    parser.add_argument("--stage", type=int, default=2)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT

    model = GPT(8192, 512, 8, heads=8, length=64)
    batch = torch.randint(0, 8192, (2, 64))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    model, opt = zero.zeroify(model, opt, stage=args.stage)
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "without": None,
            "with a Monitor": {"to": f"{folder}/run.jsonl", "samples": 2},
            "with a Monitor and a trace": {"to": (), "trace": f"{folder}/trace"},
        }
        for how in ways.values():
            block(model, opt, batch, args.steps, how)
        found = [{way: block(model, opt, batch, args.steps, how) for way, how in ways.items()}
                 for _ in range(args.pairs)]  # fmt: skip
    if hvd.rank() == 0:
        text = report(found, args)
        print(text)
        RESULT.write_text(text)


def block(model, opt, batch, steps: int, how) -> float:
    """Seconds of a step: the mean, as a record costs something in every tenth only."""
    monitor = None if how is None else zero.Monitor(opt, every=steps, **how)
    start = time.perf_counter()
    for _ in range(steps):
        opt.zero_grad()
        model(batch).backward()
        opt.step()
    seconds = (time.perf_counter() - start) / steps
    if monitor is not None:
        monitor.close()
    return seconds


def report(found: list[dict[str, float]], args: argparse.Namespace) -> str:
    lines = [
        "# What zero.Monitor adds to a step",
        "",
        f"GPT with 33.6 M parameters, stage {args.stage}, {hvd.size()} ranks with one thread each, "
        f"{os.cpu_count()} cores ({platform.machine()}). Blocks of {args.steps} steps with one "
        f"record each, {args.pairs} of every kind, alternating in the same processes. `mpirun -np "
        f"{hvd.size()} --bind-to none python benchmarks/monitor_overhead.py --pairs {args.pairs} "
        f"--steps {args.steps} --stage {args.stage}`",
        "",
        "| | ms per step, median | of a step without, median | middle half |",
        "|---|---|---|---|",
    ]
    for way in found[0]:
        seconds = statistics.median(pair[way] for pair in found)
        ratios = [pair[way] / pair["without"] for pair in found]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(f"| {way} | {1e3 * seconds:.1f} | {middle:.3f} | {low:.3f} - {high:.3f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
