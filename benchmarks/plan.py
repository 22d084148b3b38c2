"""How right `zero.plan` is: against memory_report, and against the peak that a process really had.

    python benchmarks/plan.py                    # all models, stages 0-3, 2 and 4 ranks
    python benchmarks/plan.py gpt mlp --np 2     # some of them

Each model, stage and number of ranks runs in processes of its own. The peak is the kernel's VmHWM
less what the process held before it made the model, of the rank that held most. Unless --heap is
given, memory that is freed goes back to the system at once: what is compared is what is in use.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import statistics
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

HERE = Path(__file__).resolve()
STEPS = 3
# glibc keeps what is freed in its heap, in pieces that may not fit what comes next: how much of it
# depends on the order of allocations. With a fixed threshold, tensors go back to the system.
WHAT_IS_FREED_IS_GONE = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class Blocks(nn.Module):
    """A GPT: causal attention, the head not tied to the embedding."""

    def __init__(self, vocab=8000, dim=512, depth=6, heads=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, heads, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recommender(nn.Module):
    """Large tables, small layers."""

    def __init__(self, rows=150_000, dim=64, tables=3):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * dim, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, rows):
        return self.top(torch.cat([t(rows[:, i]) for i, t in enumerate(self.tables)], dim=1))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return F.relu(x + self.body(x))


def resnet(width=256, depth=8):
    blocks = [Residual(width) for _ in range(depth)]
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 4), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(width, 10),
    )  # fmt: skip


def mlp(width=1536, depth=10):
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Recurrent(nn.Module):
    def __init__(self, vocab=4000, dim=640, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


def tokens(vocab, *shape):
    return lambda: torch.randint(0, vocab, shape)


# Model, inputs, number of classes. Sizes are such that 4 ranks run on a laptop.
MODELS = {
    "gpt": (Blocks, tokens(8000, 4, 128), 8000),
    "gpt, long batch": (lambda: Blocks(4000, 384, 4, 6), tokens(4000, 8, 256), 4000),
    "mlp": (mlp, lambda: torch.randn(64, 1536), 10),
    "resnet": (resnet, lambda: torch.randn(16, 3, 64, 64), 10),
    "recommender": (Recommender, tokens(150_000, 256, 3), 10),
    "lstm": (Recurrent, tokens(4000, 8, 32), 4000),
}


def loss_of(out, classes):
    out = out.reshape(-1, classes)
    return F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))


def resident(field):
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


def train(name, stage, steps, zero):
    make, inputs, classes = MODELS[name]
    model = make()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, opt = zero.zeroify(model, opt, stage=stage)
    report = None
    for _ in range(steps):
        opt.zero_grad()
        loss_of(model(inputs()), classes).backward()
        opt.step()
        report = zero.memory_report(opt)
    return report, zero.communication_report(opt)


def warm_up(stage, zero):
    """Load every library that a step uses, and start every thread."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 32), nn.Linear(32, 4))
    attention = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model.append(nn.LSTM(4, 4))
    opt = torch.optim.AdamW([*model.parameters(), *attention.parameters()])
    whole = nn.ModuleList([model, attention])
    whole, opt = zero.zeroify(whole, opt, stage=min(stage, 2))
    for _ in range(2):
        out = model(torch.randn(8, 3, 4, 4))[0].sum() + attention(torch.randn(2, 8, 32)).sum()
        out.backward()
        opt.step()
        opt.zero_grad()
    opt.close()


def worker(name, stage):
    import horovod.torch as hvd

    import zerohvd.torch as zero

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    make, inputs, classes = MODELS[name]
    with torch.device("meta"):
        model = make()
    plan = zero.plan(
        model, torch.optim.AdamW(model.parameters()), batch=inputs(),
        loss=lambda out: loss_of(out, classes),
    )  # fmt: skip
    row = plan.row(stage)
    del model
    warm_up(stage, zero)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    report, moved = train(name, stage, STEPS, zero)
    peak = resident("VmHWM") - before
    expected = row.memory.reported(grads=True)
    found = {
        "peak": peak,
        "planned": row.memory.peak,
        "report": report["total"] - report["buffers"],
        "planned_report": expected["total"],
        "moved": moved["total"].bytes,
        "planned_moved": row.moved,
        "parts": {**row.as_dict(), "timeline": plan.workload.timeline.peak},
    }  # fmt: skip
    everyone = hvd.allgather_object(found)
    if hvd.rank() == 0:
        worst = max(everyone, key=lambda f: f["peak"])
        print("RESULT " + json.dumps(worst), flush=True)


def main():
    from zerohvd.launching import launch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--np", type=int, action="append", help="numbers of ranks: 2 and 4")
    parser.add_argument("--stage", type=int, action="append", help="stages: 0 to 3")
    parser.add_argument("--heap", action="store_true", help="glibc's heap as it is by default")
    parser.add_argument("--verbose", action="store_true", help="the parts of every plan")
    args = parser.parse_args()
    env = {"OMP_NUM_THREADS": "1", **({} if args.heap else WHAT_IS_FREED_IS_GONE)}
    errors, reports, moves = [], [], []
    print(f"{'model':<16} ranks stage   peak MiB  planned  error  report  moved", flush=True)
    for name in args.models or MODELS:
        for np in args.np or (2, 4):
            for stage in args.stage or range(4):
                argv = [sys.executable, str(HERE), "--worker", name, str(stage)]
                done = launch(np, argv, timeout=300, env=env)
                line = next((x for x in done.stdout.splitlines() if "RESULT " in x), None)
                if line is None:
                    sys.exit(f"{name}, {np} ranks, stage {stage}: {done.explain()}")
                r = json.loads(line.partition("RESULT ")[2])
                errors.append(r["planned"] / r["peak"] - 1)
                reports.append(r["planned_report"] / r["report"] - 1)
                moves.append(r["planned_moved"] / max(1, r["moved"]) - 1)
                print(
                    f"{name:<16} {np:>5} {stage:>5} {r['peak'] / 2**20:>10.1f} "
                    f"{r['planned'] / 2**20:>8.1f} {errors[-1]:>+6.1%} {reports[-1]:>+7.2%} "
                    f"{moves[-1]:>+6.1%}",
                    flush=True,
                )
                if args.verbose:
                    print("   ", r["parts"], flush=True)
    within = statistics.mean(abs(e) <= 0.1 for e in errors)
    print(f"{len(errors)} runs; within 10 % of the peak: {within:.0%}; lowest: {min(errors):+.1%}, "
          f"highest: {max(errors):+.1%}; memory_report: at most {max(map(abs, reports)):.2%} off; "
          f"bytes moved: {max(map(abs, moves)):.2%}")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]))
    else:
        main()
