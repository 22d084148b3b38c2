"""Step time and peak memory of PyTorch training, against the ways people have today.

    python benchmarks/torch_step_time.py --rounds 8

Two ranks with one thread each train the same GPT with fused AdamW in float32. For step times all
contenders live in the same processes and take turns, so that a busy machine slows all of them
(each with the settings of the C library's heap that it would have in a process of its own);
for memory each gets fresh processes, and its peak is the high-water mark of the resident set less
what it was before the model was made. DeepSpeed takes part if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

from zerohvd.launching import launch
from zerohvd.tools.launchers import detect

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/torch_step_time.md"
TIMED = ["horovod", "zero-1", "zero-2", "ddp", "ddp+zero-redundancy"]
MEASURED = ["horovod", "zero-1", "zero-2"]
STEPS_A_TURN = 4


# -- inside a rank ---------------------------------------------------------------------------------


class Contender:
    """A model and its optimizer, made ready in one of the ways."""

    def __init__(self, way: str, args: argparse.Namespace) -> None:
        import torch

        sys.path.insert(0, str(ROOT / "examples"))
        from gpt import GPT

        torch.manual_seed(0)
        self.model = GPT(args.vocab, args.dim, args.layers, heads=8, length=args.length)
        self.params = sum(p.numel() for p in self.model.parameters())
        self.step = getattr(self, way.replace("-", "_").replace("+", "_"))(torch)

    def adamw(self, torch):
        return torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)

    def plainly(self, opt, model=None):
        model = model or self.model

        def step(batch):
            opt.zero_grad()
            model(batch).backward()
            opt.step()

        return step

    def compute(self, torch):
        return self.plainly(self.adamw(torch))

    def horovod(self, torch):
        import horovod.torch as hvd

        named = self.model.named_parameters()
        return self.plainly(hvd.DistributedOptimizer(self.adamw(torch), named_parameters=named))

    def zero(self, torch, stage):
        import zerohvd.torch as zero

        _, opt = zero.zeroify(self.model, self.adamw(torch), stage=stage)
        return self.plainly(opt)

    def zero_1(self, torch):
        return self.zero(torch, 1)

    def zero_2(self, torch):
        return self.zero(torch, 2)

    def zero_3(self, torch):
        return self.zero(torch, 3)

    def fsdp2(self, torch):
        from torch.distributed.fsdp import fully_shard

        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        return self.plainly(self.adamw(torch))

    def ddp(self, torch):
        model = torch.nn.parallel.DistributedDataParallel(self.model)
        return self.plainly(self.adamw(torch), model)

    def ddp_zero_redundancy(self, torch):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = torch.nn.parallel.DistributedDataParallel(self.model)
        opt = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, lr=3e-4, fused=True
        )
        return self.plainly(opt, model)

    def deepspeed_2(self, torch):
        return self.deepspeed(torch, 2)

    def deepspeed_3(self, torch):
        return self.deepspeed(torch, 3)

    def deepspeed(self, torch, stage):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "overlap_comm": True},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.adamw(torch), config=config
        )

        def step(batch):
            engine.backward(engine(batch))
            engine.step()

        return step


def rank_main(args: argparse.Namespace) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    ways = args.ways.split(",")
    if any(way.startswith(("ddp", "deepspeed", "fsdp")) for way in ways):
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(args.port),
            RANK=str(hvd.rank()),
            LOCAL_RANK=str(hvd.local_rank()),
            WORLD_SIZE=str(hvd.size()),
        )
        torch.distributed.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())
    torch.manual_seed(hvd.rank())
    batch = torch.randint(0, args.vocab, (args.batch, args.length))
    found = peak(ways[0], batch, args) if args.memory else turns(ways, batch, args)
    if hvd.rank() == 0:
        args.result.write_text(json.dumps(found))


def turns(ways, batch, args) -> dict:
    """Seconds per step of each contender: the median over a round's steps, for every round."""
    import horovod.torch as hvd
    import torch

    contenders = {way: Contender(way, args) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds + 1):
        for way, contender in contenders.items():
            choose_malloc(way)
            hvd.allreduce(torch.zeros(1), name="start together")
            taken = []
            for _ in range(STEPS_A_TURN):
                start = time.perf_counter()
                contender.step(batch)
                taken.append(time.perf_counter() - start)
            seconds[way].append(statistics.median(taken[1:]))
    kept = {way: values[1:] for way, values in seconds.items()}  # the first round warms up
    return {"params": contenders[ways[0]].params, "seconds": kept}


def choose_malloc(way: str) -> None:
    """The C library's settings are those of the process: each contender gets those it has alone."""
    from zerohvd.torch import heap

    if way.startswith("zero"):
        heap.keep_large()
    else:
        heap.leave_alone()


def peak(way, batch, args) -> dict:
    before = resident("VmRSS")
    contender = Contender(way, args)
    for _ in range(4):
        contender.step(batch)
    return {"bytes": resident("VmHWM") - before}


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


# -- outside ---------------------------------------------------------------------------------------


def start(ways: list[str], args: argparse.Namespace, *, memory: bool) -> dict:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        result = Path(folder, "result.json")
        sizes = [f"--{k}={getattr(args, k)}" for k in SIZES]
        inner = ["--ways", ",".join(ways), "--result", str(result), "--port", str(port), *sizes]
        argv = [sys.executable, __file__, *inner, f"--rounds={args.rounds}"]
        done = launch(
            args.np,
            [*argv, "--memory"] if memory else argv,
            timeout=1800,
            env={"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        )
        if not done.ok:
            raise SystemExit(done.explain())
        return json.loads(result.read_text())


def report(timed: dict, peaks: dict[str, int], args: argparse.Namespace) -> str:
    medians = {way: statistics.median(v) for way, v in timed["seconds"].items()}
    best = {way: min(v) for way, v in timed["seconds"].items()}
    base, best_base = timed["seconds"]["horovod"], best["horovod"]
    rows = []
    for way, values in timed["seconds"].items():
        ratio = statistics.median(v / b for v, b in zip(values, base, strict=True))
        rows.append(
            f"| {way} | {1e3 * medians[way]:.0f} | {ratio:.2f} | {best[way] / best_base:.2f} |"
        )
    lines = [
        "# PyTorch: step time and peak memory",
        "",
        f"GPT with {timed['params'] / 1e6:.1f} M parameters, fused AdamW, float32, batch "
        f"{args.batch} x {args.length}, {args.np} ranks with one thread each, over MPI with "
        f"OMPI_MCA_mpi_yield_when_idle=1; {os.cpu_count()} cores ({platform.machine()}), "
        f"{args.rounds} rounds. `python benchmarks/{Path(sys.argv[0]).name} --np {args.np} "
        f"--rounds {args.rounds}`",
        "",
        "| | ms per step, median | of Horovod's, median over rounds | of Horovod's, best round |",
        "|---|---|---|---|",
        *rows,
        "",
        "| | peak memory, MiB | of Horovod's |",
        "|---|---|---|",
    ]
    for way, held in peaks.items():
        lines.append(f"| {way} | {held / 2**20:.0f} | {held / peaks['horovod']:.2f} |")
    return "\n".join(lines) + "\n"


SIZES = {"vocab": 16384, "dim": 512, "layers": 8, "batch": 2, "length": 64}


def main(
    timed: list[str] = TIMED,
    measured: list[str] = MEASURED,
    deepspeed: str = "deepspeed-2",
    saved: Path = RESULT,
) -> None:
    """
    Args:
        timed: Who is timed, unless others are asked for.
        measured: Whose peak memory is measured.
        deepspeed: DeepSpeed's way, which takes part if it is installed.
        saved: Where the result goes.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ways", help="default: all")
    parser.add_argument("--no-memory", action="store_true", help="step times only")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, kind in (("--result", Path), ("--port", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if detect(os.environ).launched:
        rank_main(args)
        return
    ways = args.ways.split(",") if args.ways else list(timed)
    if not args.ways and importlib.util.find_spec("deepspeed"):
        ways.append(deepspeed)
    seconds = start(ways, args, memory=False)
    alone = {} if args.no_memory else {w: start([w], args, memory=True) for w in measured}
    text = report(seconds, {way: found["bytes"] for way, found in alone.items()}, args)
    print(text)
    saved.parent.mkdir(exist_ok=True)
    saved.write_text(text)


if __name__ == "__main__":
    main()
