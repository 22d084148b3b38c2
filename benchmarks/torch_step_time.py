"""Step time and peak memory of PyTorch training, against the ways people have today.

    python benchmarks/torch_step_time.py --rounds 4
    python benchmarks/torch_step_time.py --rounds 4 --tied

Two ranks with one thread each train the same GPT with fused AdamW in float32. Every contender runs
in processes of its own, with the same environment. A round starts each of them once, one after
the other, so that a busy machine slows all of them; the result is the median over rounds. Peak
memory is the high-water mark of the resident set less the resident set before the model is built,
of the rank that needs most. Contenders that are not installed are left out.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerohvd.launchers import detect
from zerohvd.launching import launch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
NEEDS = {"deepspeed-2": "deepspeed", "deepspeed-3": "deepspeed"}
SIZES = {"dim": 512, "layers": 8, "batch": 2, "length": 64}
VOCAB = {True: 16384, False: 8192}  # tied or not: 33.6 M parameters either way
WARM_UP = 3

Step = Callable[[Any], None]


# -- inside a rank ---------------------------------------------------------------------------------


def plainly(model: Any, opt: Any) -> Step:
    def step(batch: Any) -> None:
        opt.zero_grad()
        model(batch).backward()
        opt.step()

    return step


def horovod(model: Any, opt: Any) -> Step:
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    named = model.named_parameters()
    return plainly(model, hvd.DistributedOptimizer(opt, named_parameters=named))


def zero(stage: int) -> Callable[[Any, Any], Step]:
    def make(model: Any, opt: Any) -> Step:
        import zerohvd.torch as zero

        return plainly(*zero.zeroify(model, opt, stage=stage))

    return make


def ddp(model: Any, opt: Any) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return plainly(DistributedDataParallel(model), opt)


def ddp_zero_redundancy(model: Any, opt: Any) -> Step:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    options = {"lr": opt.defaults["lr"], "fused": True}
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    return plainly(DistributedDataParallel(model), sharded)


def fsdp2(model: Any, opt: Any) -> Step:
    import torch
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return plainly(model, torch.optim.AdamW(model.parameters(), lr=opt.defaults["lr"], fused=True))


def deepspeed(stage: int) -> Callable[[Any, Any], Step]:
    def make(model: Any, opt: Any) -> Step:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "overlap_comm": True},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=config)

        def step(batch: Any) -> None:
            engine.backward(engine(batch))
            engine.step()

        return step

    return make


CONTENDERS: dict[str, Callable[[Any, Any], Step]] = {
    "horovod": horovod,
    "zero-1": zero(1),
    "zero-2": zero(2),
    "zero-3": zero(3),
    "ddp": ddp,
    "ddp+zero-redundancy": ddp_zero_redundancy,
    "fsdp2": fsdp2,
    "deepspeed-2": deepspeed(2),
    "deepspeed-3": deepspeed(3),
}


def rank_main(args: argparse.Namespace) -> None:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    import torch

    torch.set_num_threads(1)
    if args.way.startswith(("horovod", "zero")):
        import horovod.torch as hvd

        hvd.init()
        if args.way.startswith("zero"):
            importlib.import_module("zerohvd.torch")
    else:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(args.np))
        torch.distributed.init_process_group("gloo")
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT

    torch.manual_seed(1 + rank)
    batch = torch.randint(0, VOCAB[args.tied], (args.batch, args.length))
    Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark of the imports
    before = resident("VmRSS")
    torch.manual_seed(0)
    model = GPT(VOCAB[args.tied], args.dim, args.layers, heads=8, length=args.length)
    if not args.tied:
        model.head.weight = torch.nn.Parameter(model.tokens.weight.detach().clone())
    params = sum(p.numel() for p in model.parameters())
    step = CONTENDERS[args.way](model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))
    taken = []
    for _ in range(WARM_UP + args.steps):
        start = time.perf_counter()
        step(batch)
        taken.append(time.perf_counter() - start)
    peak = resident("VmHWM") - before
    found = {"params": params, "seconds": statistics.median(taken[WARM_UP:]), "peak": peak}
    Path(args.result, f"rank{rank}.json").write_text(json.dumps(found))


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


# -- outside ---------------------------------------------------------------------------------------


def run_once(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train in fresh processes; the slowest rank's time and the largest peak."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        given = {"way": way, "result": folder, "np": args.np, "steps": args.steps}
        given |= {name: getattr(args, name) for name in SIZES}
        argv = [sys.executable, __file__, *(f"--{k}={v}" for k, v in given.items())]
        env = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = launch(args.np, argv + ["--tied"] * args.tied, timeout=600, env=env)
        if not done.ok:
            raise SystemExit(f"{way}: {done.explain()}")
        ranks = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
        worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        worst["bytes"] = worst["peak"] / worst["params"]
        return worst


def report(rounds: list[dict[str, dict[str, Any]]], args: argparse.Namespace) -> str:
    ways = list(rounds[0])
    rows = []
    for way in ways:
        seconds = [r[way]["seconds"] for r in rounds]
        ratios = [r[way]["seconds"] / r["horovod"]["seconds"] for r in rounds]
        peak = statistics.median(r[way]["bytes"] for r in rounds)
        base = statistics.median(r["horovod"]["bytes"] for r in rounds)
        rows.append(
            f"| {way} | {1e3 * statistics.median(seconds):.0f} | {statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f} - {max(ratios):.2f} | {peak:.1f} | {peak / base:.2f} |"
        )
    lines = [
        "# PyTorch: step time and peak memory",
        "",
        f"GPT with {rounds[0][ways[0]]['params'] / 1e6:.1f} M parameters, embedding "
        f"{'tied to' if args.tied else 'apart from'} the head, fused AdamW, float32, batch "
        f"{args.batch} x {args.length}, {args.np} ranks with one thread each, "
        f"OMPI_MCA_mpi_yield_when_idle=1; {os.cpu_count()} cores ({platform.machine()}). Every "
        f"contender in processes of its own, medians of {len(rounds)} interleaved rounds of "
        f"{args.steps} steps. `python benchmarks/torch_step_time.py --np {args.np} --rounds "
        f"{len(rounds)} --steps {args.steps}{' --tied' * args.tied}`",
        "",
        "| | ms per step | of Horovod's | range over rounds | peak bytes/param | of Horovod's |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round")
    parser.add_argument("--tied", action="store_true", help="tie the embedding to the head")
    parser.add_argument("--ways", help=f"default: {','.join(CONTENDERS)}; horovod always runs")
    parser.add_argument("--raw", type=Path, help="keep rounds in this file, and add to those in it")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("--way", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if detect(os.environ).launched:
        rank_main(args)
        return
    ways = ["horovod", *(args.ways.split(",") if args.ways else list(CONTENDERS)[1:])]
    missing = [w for w in ways if w in NEEDS and importlib.util.find_spec(NEEDS[w]) is None]
    for way in missing:
        print(f"{way} is left out: {NEEDS[way]} is not installed", flush=True)
    ways = [way for way in dict.fromkeys(ways) if way not in missing]
    rounds = json.loads(args.raw.read_text()) if args.raw and args.raw.exists() else []
    for _ in range(args.rounds):
        rounds.append({})
        for way in ways:
            rounds[-1][way] = found = run_once(way, args)
            ms, size = 1e3 * found["seconds"], found["bytes"]
            print(f"{way}: {ms:.0f} ms, {size:.1f} bytes/param", flush=True)
    if args.raw:
        args.raw.write_text(json.dumps(rounds))
    text = report(rounds, args)
    print(text)
    if not args.ways:
        RESULTS.mkdir(exist_ok=True)
        name = "torch_step_time_tied.md" if args.tied else "torch_step_time.md"
        Path(RESULTS, name).write_text(text)


if __name__ == "__main__":
    main()
