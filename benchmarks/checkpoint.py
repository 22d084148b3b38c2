"""Saving and loading against plain writes and torch.distributed.checkpoint, in one run.

    python benchmarks/checkpoint.py

Every rank writes as many bytes as it would of the checkpoint, from memory, with fsync: that is
"plain write", the least there is to do. Rounds of all contenders alternate, and ratios are taken
per round, so that a busy disk slows all of them. torch.distributed.checkpoint gets the same model
and optimizer state, unsharded, of which it lets each rank write a part.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from zerohvd.launchers import detect
from zerohvd.launching import launch

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "checkpoint.md"
BLOCK = 8 << 20


def build(args: argparse.Namespace):
    """The model after one step, sharded and plain."""
    import horovod.torch as hvd
    import torch

    import zerohvd.torch as zero

    sys.path.insert(0, str(HERE.parent / "examples"))
    from gpt import GPT

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(0, args.vocab, (1, 16))
    made = []
    for sharded in (True, False):
        model = GPT(args.vocab, args.dim, args.layers)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if sharded:
            model, opt = zero.zeroify(model, opt, stage=2)
        model(tokens).backward()
        opt.step()
        opt.zero_grad()
        made += [model, opt]
    return hvd, zero, made


def plain_write(path: Path, data: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for start in range(0, len(data), BLOCK):
        os.write(fd, data[start : start + BLOCK])
    os.fsync(fd)
    os.close(fd)


def rank_main(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore")
    import horovod.torch as hvd

    hvd.init()
    store = dist.TCPStore("127.0.0.1", args.port, hvd.size(), hvd.rank() == 0)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    hvd, zero, (model, opt, plain_model, plain_opt) = build(args)
    folder = Path(hvd.broadcast_object(args.folder, root_rank=0, name="folder"))
    state = {"model": plain_model.state_dict(), "optimizer": plain_opt.state_dict()["state"]}
    state["optimizer"] = {str(k): v for k, v in state["optimizer"].items()}
    zero.save(folder / "zero", model, opt)
    shard = sorted((folder / "zero").glob("shard-*"))[hvd.rank()]
    data = memoryview(bytearray(os.urandom(1 << 20)) * (shard.stat().st_size // (1 << 20)))
    ways: dict[str, Callable[[], object]] = {
        "plain write": lambda: plain_write(folder / f"plain{hvd.rank()}", data),
        "zero.save": lambda: zero.save(folder / "zero", model, opt),
        "torch.distributed.checkpoint, save": lambda: dcp.save(state, checkpoint_id=folder / "dcp"),
        "zero.load": lambda: zero.load(folder / "zero", model, opt),
        "torch.distributed.checkpoint, load": lambda: dcp.load(state, checkpoint_id=folder / "dcp"),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(args.rounds + 1):
        for way, act in ways.items():
            if hvd.rank() == 0 and not way.endswith("load"):
                clear(folder, way)
            hvd.barrier()
            start = time.perf_counter()
            act()
            hvd.barrier()
            if number:  # the first round warms up
                seconds[way].append(time.perf_counter() - start)
    sizes = hvd.allgather_object(shard.stat().st_size)
    if hvd.rank() == 0:
        text = report(seconds, sum(sizes), args)
        print(text)
        RESULT.write_text(text)
    dist.destroy_process_group()


def clear(folder: Path, way: str) -> None:
    """Every contender writes new files."""
    name = {"plain write": "plain*", "zero.save": "zero*"}.get(way, "dcp*")
    for path in folder.glob(name):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()


def report(seconds: dict[str, list[float]], nbytes: int, args: argparse.Namespace) -> str:
    base = {"save": seconds["plain write"], "load": seconds["torch.distributed.checkpoint, load"]}
    rows = []
    for way, values in seconds.items():
        against = base["load" if way.endswith("load") else "save"]
        ratio = statistics.median(v / b for v, b in zip(values, against, strict=True))
        median = statistics.median(values)
        rows.append(
            f"| {way} | {median:.2f} | {nbytes / median / 1e9:.2f} | {ratio:.2f} | "
            f"{min(values) / min(against):.2f} |"
        )
    return "\n".join(
        [
            "# Checkpoints: time to save and load",
            "",
            f"GPT with AdamW state, float32, {nbytes / 1e6:.0f} MB, {args.np} ranks on "
            f"{os.cpu_count()} cores ({platform.machine()}), local disk, everything on disk "
            f"(fsync) when a save returns; {args.rounds} rounds. Saves are compared with a plain "
            "write of the same bytes, loads (from the page cache) with "
            "torch.distributed.checkpoint's, which checks no checksums. "
            f"`python benchmarks/checkpoint.py --rounds {args.rounds}`",
            "",
            "| | seconds, median | GB/s | ratio, median over rounds | ratio, best rounds |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if detect(os.environ).launched:
        rank_main(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        job = [sys.executable, __file__, "--folder", folder, "--port", str(free_port())]
        for name in ("np", "rounds", "vocab", "dim", "layers"):
            job += [f"--{name}", str(getattr(args, name))]
        done = launch(args.np, job, timeout=900, env={"OMP_NUM_THREADS": "1"}, echo=True)
    if not done.ok:
        sys.exit(done.explain())


if __name__ == "__main__":
    main()
