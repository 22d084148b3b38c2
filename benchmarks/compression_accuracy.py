"""What compression does to the loss: a character GPT on the standard library, option by option.

    python benchmarks/compression_accuracy.py --ranks 2 --seeds 1
    python benchmarks/compression_accuracy.py --ranks 2 4 --seeds 3

Every option trains the same model from the same start on the same text for 500 steps, all of them
in one job. The final loss is the mean over the last 50 steps and all ranks, the bytes those of one
step and rank by `zero.communication_report`. The table and the curves go to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from zerohvd.launching import launch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
SIZES = {"vocab": 128, "dim": 64, "layers": 2, "heads": 4, "length": 64}
BATCH, LAST = 8, 50


def options() -> dict[str, dict[str, Any]]:
    """By their names in the table. Two bytes per number are for orientation."""
    import zerohvd.torch as zero

    c = zero.Compression
    return {
        "none": {},
        "bf16 gradients": {"compression": c.bf16},
        "int8 gradients": {"compression": c.int8},
        "int8 both ways": {"compression": c.int8, "param_compression": c.int8},
        "int4 gradients": {"compression": c.int4},
        "int4 both ways": {"compression": c.int4, "param_compression": c.int4},
        "top-k 1 %": {"compression": c.topk(0.01)},
        "random-k 10 %": {"compression": c.randomk(0.1)},
        "int8 both ways, stage 3": {
            "compression": c.int8, "param_compression": c.int8, "stage": 3
        },
    }  # fmt: skip


# -- inside a rank ---------------------------------------------------------------------------------


def text() -> Any:
    """The sources of the standard library, as characters."""
    import torch

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(f.read_bytes() for f in files)
    characters = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return characters[characters < SIZES["vocab"]].long()


def train(kind: dict[str, Any], data: Any, seed: int, steps: int) -> dict[str, Any]:
    """The losses of one option, and what a step moves."""
    import horovod.torch as hvd
    import torch

    import zerohvd.torch as zero

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT

    torch.manual_seed(seed)
    model = GPT(**SIZES)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, opt = zero.zeroify(model, inner, **{"stage": 2, **kind})
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        places = torch.randint(len(data) - SIZES["length"] - 1, (BATCH,), generator=generator)
        batch = torch.stack([data[p : p + SIZES["length"] + 1] for p in places])
        opt.zero_grad()
        loss = model(batch)
        loss.backward()
        opt.step()
        schedule.step()
        losses.append(loss.item())
    mean = hvd.allreduce(torch.tensor(losses), name="losses").tolist()
    moved = zero.communication_report(opt)
    return {
        "losses": mean,
        "ms": 1e3 * (time.perf_counter() - start) / steps,
        "gradients": moved["reducescatter"].bytes,
        "parameters": moved["allgather"].bytes,
    }


def rank_main(seeds: int, steps: int, out: str, only: list[str]) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    data, found = text(), {}
    for name, kind in options().items():
        if not only or name in only:
            found[name] = [train(dict(kind), data, seed, steps) for seed in range(seeds)]
            if hvd.rank() == 0:
                print(name, statistics.mean(found[name][0]["losses"][-LAST:]), flush=True)
    if hvd.rank() == 0:
        Path(out).write_text(json.dumps(found))


# -- the table and the plot ------------------------------------------------------------------------


def table(found: dict[str, Any], ranks: int, steps: int) -> str:
    lines = [
        f"## {ranks} ranks, {len(found['none'])} seeds, {steps} steps",
        "",
        "| option | final loss | against none, worst seed | gradients KiB | parameters KiB | ms |",
        "|---|---|---|---|---|---|",
    ]
    final = {n: [statistics.mean(r["losses"][-LAST:]) for r in runs] for n, runs in found.items()}
    for name, runs in found.items():
        ratios = [a / b - 1 for a, b in zip(final[name], final["none"], strict=True)]
        row = [
            name,
            f"{statistics.mean(final[name]):.4f}",
            f"{100 * max(ratios):+.2f} %",
            f"{runs[0]['gradients'] / 1024:,.1f}",
            f"{runs[0]['parameters'] / 1024:,.1f}",
            f"{statistics.median(r['ms'] for r in runs):.0f}",
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, ""])


def plot(found: dict[str, Any], path: Path) -> bool:
    """Draw the curves; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, runs in found.items():
        losses = runs[0]["losses"]
        smooth = [statistics.mean(losses[max(0, i - 20) : i + 1]) for i in range(len(losses))]
        axes.plot(smooth, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss, mean of 20 steps", ylim=(None, 4))
    axes.legend()
    figure.savefig(path, bbox_inches="tight")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--only", nargs="*", default=[], help="names of options; none is needed")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        rank_main(args.seeds, args.steps, args.out, args.only)
        return
    tables = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/found.json"
            command = [sys.executable, __file__, "--out", out, "--seeds", str(args.seeds)]
            command += ["--steps", str(args.steps), "--only", *args.only]
            done = launch(ranks, command, timeout=7200, echo=True)
            if done.returncode:
                raise SystemExit(done.returncode)
            found = json.loads(Path(out).read_text())
        tables.append(table(found, ranks, args.steps))
        plot(found, RESULTS / f"compression_accuracy_{ranks}.svg")
        print(tables[-1], flush=True)
    head = "# What compression does to the loss\n\n" + (__doc__ or "").split("\n\n")[2] + "\n\n"
    (RESULTS / "compression_accuracy.md").write_text(head + "\n".join(tables))


if __name__ == "__main__":
    main()
