"""Several hosts: bytes across a link and step time of every stage, against plain Horovod.

    python benchmarks/hosts.py --ranks 2 4 --rates free 1gbit

As root: makes two hosts on this machine (tests/lab/hosts.py: namespaces, joined by links of a given
rate), starts ranks on them with mpirun, and takes all contenders' steps in turns, in the same
processes: a busy machine slows all of them. Bytes are those that leave the first host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = ("horovod", "zero-0", "zero-1", "zero-2", "zero-3")
WARM_UP = 2
COLUMNS = "| hosts x ranks | link | | MB per step | of Horovod's | ms per step | of Horovod's |"


# -- inside a rank ---------------------------------------------------------------------------------


def sent() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[8])
    return 0


def make(contender: str, dim: int, layers: int) -> tuple[Any, Any]:
    import horovod.torch as hvd
    import torch
    from gpt import GPT

    import zerohvd.torch as zero

    torch.manual_seed(0)
    model = GPT(vocab=1024, dim=dim, layers=layers)
    opt = torch.optim.AdamW(model.parameters(), 1e-4)
    if contender == "horovod":
        named = model.named_parameters()
        return model, hvd.DistributedOptimizer(opt, named_parameters=named)
    return zero.zeroify(model, opt, stage=int(contender[-1]))


def rank_main(dim: int, layers: int, rounds: int, result: str) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import horovod.torch as hvd
    import torch

    import zerohvd.torch  # noqa: F401  before hvd.init()

    hvd.init()
    torch.set_num_threads(1)
    batch = torch.randint(1024, (2, 33), generator=torch.Generator().manual_seed(hvd.rank()))
    made = {name: make(name, dim, layers) for name in CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    moved: dict[str, list[int]] = {name: [] for name in CONTENDERS}
    for number in range(WARM_UP + rounds):
        for name, (model, opt) in made.items():
            hvd.allreduce(torch.zeros(1), name="before")
            bytes_before, start = sent(), time.perf_counter()
            opt.zero_grad()
            model(batch).backward()
            opt.step()
            seconds = time.perf_counter() - start
            hvd.allreduce(torch.zeros(1), name="after")
            if number >= WARM_UP:
                times[name].append(seconds)
                moved[name].append(sent() - bytes_before)
    if hvd.rank() == 0:
        params = sum(p.numel() for p in made["horovod"][0].parameters())
        found = {"params": params, "times": times, "moved": moved}
        Path(result).write_text(json.dumps(found))


# -- outside ---------------------------------------------------------------------------------------


def measure(hosts: Any, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    from zerohvd.launching import find_mpirun

    mpirun = find_mpirun()
    where = f"h1:{ranks},h2:{ranks}"
    with tempfile.NamedTemporaryFile() as result:
        job = [sys.executable, __file__, "--rank", result.name]
        sizes = [str(n) for n in (args.dim, args.layers, args.rounds)]
        start = [str(mpirun), "--prefix", str(mpirun.parent.parent), "--bind-to", "none"]
        passed = ["-x", "PATH", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS=1"]
        done = hosts["h1"].run(
            [*start, *passed, "-np", str(2 * ranks), "--host", where, *job, *sizes],
            timeout=args.timeout,
        )
        if not done.ok:
            sys.exit(done.explain())
        return json.loads(Path(result.name).read_text())


def rows(ranks: int, rate: str, found: dict[str, Any]) -> list[str]:
    lines = []
    base = found["times"]["horovod"]
    for name in CONTENDERS:
        ratios = [a / b for a, b in zip(found["times"][name], base, strict=True)]
        mb = statistics.median(found["moved"][name]) / 1e6
        mb_horovod = statistics.median(found["moved"]["horovod"]) / 1e6
        ms = statistics.median(found["times"][name]) * 1e3
        lines.append(
            f"| 2 x {ranks} | {rate} | {name} | {mb:.1f} | {mb / mb_horovod:.2f} | {ms:.0f} | "
            f"{statistics.median(ratios):.2f} |"
        )
    return lines


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*map(int, sys.argv[3:6]), sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="per host")
    parser.add_argument("--rates", nargs="+", default=["free", "1gbit"])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=300)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "lab"))
    from hosts import Hosts

    print(COLUMNS + "\n|" + "---|" * 7, flush=True)
    with Hosts(2) as hosts:
        for rate in args.rates:
            hosts.rate(None if rate == "free" else rate)
            for ranks in args.ranks:
                found = measure(hosts, ranks, args)
                print("\n".join(rows(ranks, rate, found)), flush=True)
    print(
        f"\n{found['params'] / 1e6:.1f} M parameters, {os.cpu_count()} cores, {args.rounds} rounds"
    )


if __name__ == "__main__":
    main()
