"""The largest GPT that trains when every rank may use only so much memory.

    python benchmarks/largest_model.py --np 4 --limit-mib 2048

Three contenders: plain Horovod, stage 3, and stage 3 with its optimizer state on disk, all with the
same optimizer. For each the number of blocks grows by an eighth until training fails, and then the
largest that trains is looked for in between, to `--precision`. Every attempt is a job of its own
that makes the model and trains for two steps: from the second one on, everything is there.

The limit is RLIMIT_DATA: what a rank writes to and shares with nobody, which is what a model, its
gradients and its optimizer take. RLIMIT_AS would count address space that libraries only reserve,
RLIMIT_RSS is not enforced by Linux, and a cgroup needs rights that a user may not have. Files that
are mapped into memory do not count, as the kernel can take their pages back whenever it likes; the
high-water mark of the resident set is printed, so that one can see that they are not the memory in
disguise.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from zerohvd.launchers import detect
from zerohvd.launching import LaunchResult, launch

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/largest_model.md"
WAYS = ("horovod", "zero-3", "zero-3, disk")
STEPS = 2


# -- inside a rank ---------------------------------------------------------------------------------


def rank_main(args: argparse.Namespace) -> None:
    limit = args.limit_mib << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import horovod.torch as hvd
    import torch

    if args.way != "horovod":  # Horovod on its own is as it comes
        import zerohvd.torch as zero

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = resident("VmRSS")
    shape = {"vocab": 256, "dim": args.dim, "layers": args.layers, "length": args.length}
    if args.way == "horovod":
        model = GPT(**shape)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    else:
        with zero.deferred_init():
            model = GPT(**shape)
    params = sum(p.numel() for p in model.parameters())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if args.way == "horovod":
        opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters())
    else:
        disk = {"offload": "disk", "path": args.path} if "disk" in args.way else {}
        model, opt = zero.zeroify(model, opt, stage=3, **disk)
    torch.manual_seed(hvd.rank())
    losses = []
    for _ in range(STEPS):
        opt.zero_grad()
        loss = model(torch.randint(0, 256, (1, args.length)))
        loss.backward()
        opt.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    peak = hvd.allreduce(torch.tensor([resident("VmHWM") - before]), op=hvd.Max, name="peak")
    if hvd.rank() == 0:
        found = {"params": params, "losses": losses, "peak": peak.item()}
        args.result.write_text(json.dumps(found))


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


# -- outside ---------------------------------------------------------------------------------------


def attempt(way: str, layers: int, args: argparse.Namespace) -> dict | None:
    """What a model of so many blocks did; None if it did not fit."""
    start = time.monotonic()
    done, found = job(way, layers, args)
    if found is None and not out_of_memory(done):  # MPI does not always say what it lacked
        print(done.explain(), flush=True)
        done, found = job(way, layers, args)
    took = time.monotonic() - start
    size = f", {found['params'] / 1e6:.0f} M parameters: trains" if found else ": does not fit"
    args.log.append(f"{way}: {layers} blocks{size} ({took:.0f} s)")
    print(args.log[-1], flush=True)
    return found


def job(way: str, layers: int, args: argparse.Namespace) -> tuple[LaunchResult, dict | None]:
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        result = Path(folder, "result.json")
        given = {"way": way, "layers": layers, "result": result, "path": folder, "dim": args.dim}
        given |= {"length": args.length, "limit-mib": args.limit_mib}
        argv = [sys.executable, str(args.script), *(f"--{k}={v}" for k, v in given.items())]
        done = launch(args.np, argv, timeout=args.timeout, env=args.env)
        fits = done.ok and result.exists()
        return done, json.loads(result.read_text()) if fits else None


def out_of_memory(done: LaunchResult) -> bool:
    text = done.explain()
    return "memory" in text.lower() or "bad_alloc" in text


def largest(way: str, layers: int, args: argparse.Namespace) -> dict:
    """The largest model that fits, to the precision asked for; `layers` to begin with."""
    fits, low, high = None, 0, None
    while layers > low and (high is None or high - low > max(1, args.precision * low)):
        found = attempt(way, layers, args)
        if found:
            fits, low = {**found, "layers": layers}, layers
        else:
            high = layers
        if high is None:
            layers = low + max(1, low // 8)
        else:
            layers = (low + high) // 2 if low else high * 3 // 4
    if fits is None:
        raise SystemExit(f"{way}: not even one block fits")
    return fits


def report(found: dict[str, dict], args: argparse.Namespace, head: str) -> str:
    base = found["horovod"]["params"]
    rows = [
        f"| {way} | {f['layers']} | {f['params'] / 1e6:.0f} M | {f['params'] / base:.2f} | "
        f"{f['peak'] / 2**20:.0f} | {f['losses'][0]:.3f} -> {f['losses'][-1]:.3f} |"
        for way, f in found.items()
    ]
    lines = [
        "# The largest model under a memory limit",
        "",
        f"{head}, width {args.dim}, {args.np} ranks with RLIMIT_DATA = "
        f"{args.limit_mib} MiB each; largest number of blocks that trains, to "
        f"{100 * args.precision:.0f} %. `python benchmarks/{args.script.name} --np {args.np} "
        f"--limit-mib {args.limit_mib} --dim {args.dim} --start '{args.start}' "
        f"--precision {args.precision}`",
        "",
        "| | blocks | parameters | of Horovod's | peak resident, MiB | loss |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "All attempts:",
        "",
        *(f"    {line}" for line in args.log),
    ]
    return "\n".join(lines) + "\n"


def arguments(description: str, ways: str, start: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--limit-mib", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--precision", type=float, default=0.05)
    parser.add_argument(
        "--start", default=start, help="blocks of the first attempt, for each of the ways"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds for an attempt")
    parser.add_argument("--path", type=Path, default=None, help="folder for the files of 'disk'")
    parser.add_argument("--ways", default=ways, help="separated by semicolons")
    for name, kind in (("--way", str), ("--layers", int), ("--result", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(args: argparse.Namespace, result: Path, head: str) -> None:
    """Look for the largest model of every way, and write what was found."""
    args.log = []
    firsts = zip(args.ways.split(";"), args.start.split(";"), strict=True)
    found = {way: largest(way, int(first), args) for way, first in firsts}
    if "horovod" in found:
        text = report(found, args, head)
        print(text)
        result.parent.mkdir(exist_ok=True)
        result.write_text(text)


def main() -> None:
    args = arguments(__doc__.splitlines()[0], ";".join(WAYS), "8;32;64")
    if detect(os.environ).launched:
        rank_main(args)
        return
    args.script, args.env = Path(__file__), {"OMP_NUM_THREADS": "1"}
    compare(args, RESULT, "GPT, float32, fused AdamW")


if __name__ == "__main__":
    main()
