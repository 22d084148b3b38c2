"""What commits to memory cost: step time of the GPT, and of a commit after every ten steps.

    zerohvd run --restarts 0 -- mpirun -np 2 --bind-to none python benchmarks/elastic.py --stage 2

With --hosts 2 every second rank believes to be on another host, so that copies are sent.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--commits", type=int, default=3)
    args = parser.parse_args()
    if "ZEROHVD_ELASTIC" not in os.environ:
        parser.error("start it by: zerohvd run --restarts 0 -- mpirun -np 2 python ...")

    import horovod.torch as hvd
    import torch
    from gpt import GPT

    import zerohvd.torch as zero

    hvd.init()
    host = socket.gethostname()
    socket.gethostname = lambda: f"{host}-{hvd.rank() % args.hosts}"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(length=64)
    params = sum(p.numel() for p in model.parameters())
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, opt = zero.zeroify(model, inner, stage=args.stage)
    state = zero.elastic.TorchState(model, opt, step=0)

    def step() -> None:
        opt.zero_grad()
        model(torch.randint(0, 16384, (2, 64))).backward()
        opt.step()

    def timed(act) -> float:
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    for _ in range(3):
        step()
    state.commit()
    steps, commits = [], []
    for _ in range(args.commits):
        steps += [timed(step) for _ in range(EVERY)]
        commits.append(timed(state.commit))
    if hvd.rank() == 0:
        bodies = Path(os.environ["ZEROHVD_ELASTIC"]).rglob("*.body")
        held = sum(p.stat().st_size for p in bodies) / params
        one, commit = statistics.median(steps), statistics.median(commits)
        print(
            f"stage {args.stage}, {hvd.size()} ranks on {args.hosts} hosts: step {one:.3f} s, "
            f"commit {commit:.3f} s ({commit / (EVERY * one):.1%} of {EVERY} steps), {held:.1f} "
            "bytes per parameter held by all hosts together"
        )


if __name__ == "__main__":
    main()
