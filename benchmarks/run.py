"""All benchmarks in one go: `make bench`, or `make bench QUICK=1` in less than ten minutes.

    python benchmarks/run.py --rounds 5
    python benchmarks/run.py --quick

Every system has processes of its own in every round, with the same settings, and the systems of a
round follow each other: a machine that becomes busy slows all of them. Then come the benchmarks
that measure other things than step time, one after the other; with --quick two short ones of them.
What is found goes to benchmarks/RESULTS.md with versions and commands, and its pictures to
docs/assets/. After an interruption, --go-on continues with the rounds that are there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras_stage3_time as keras_time
import plots
import torch_step_time as torch_time

from zerohvd.launching import launch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RAW = ROOT / ".cache/bench.json"
PACKAGES = ("zerohvd", "torch", "tensorflow-cpu", "tensorflow", "keras", "horovod", "deepspeed")
# One thread per rank for all that mpirun starts here.
ONE_THREAD = {"OMP_NUM_THREADS": "1", **keras_time.ENV, "TF_ENABLE_ONEDNN_OPTS": "0"}
Rounds = list[dict[str, dict[str, float]]]


class Other(NamedTuple):
    """A benchmark of something else than step time."""

    what: str
    argv: Sequence[str]  # of the full run
    ranks: int = 0  # 0: it starts ranks itself
    quick: Sequence[str] | None = None  # its arguments with --quick; None: left out


OTHERS = (
    Other("what a Monitor costs", ["monitor_overhead.py"], 2, ["--pairs=4"]),
    Other("checkpoints", ["checkpoint.py"], 0, ["--rounds=2"]),
    Other("PyTorch, embedding tied", ["torch_step_time.py", "--rounds=4", "--tied"]),
    Other("PyTorch, largest model", ["largest_model.py"]),
    Other("plans and real peaks", ["plan.py"]),
    Other("Keras, many models", ["keras_step_time.py"], 2),
    Other("Keras, temporary memory", ["keras_memory.py"], 2),
    Other("Keras, distance from plain Keras", ["keras_parity.py"], 4),
    Other("Keras at stage 3, held and moved", ["keras_stage3.py"], 2),
    Other("Keras, largest model", ["keras_largest_model.py", "--dim=1024"]),
    Other("Keras, embedding of 1 GiB", ["keras_embedding.py"], 2),
)


# -- step times ------------------------------------------------------------------------------------


def torch_systems() -> dict[str, Callable[[argparse.Namespace], dict[str, float]]]:
    def runs(way: str) -> Callable[[argparse.Namespace], dict[str, float]]:
        def run(args: argparse.Namespace) -> dict[str, float]:
            sizes = argparse.Namespace(np=2, tied=False, steps=args.steps, **torch_time.SIZES)
            return torch_time.run_once(way, sizes)

        return run

    needs = torch_time.NEEDS
    found = [w for w in torch_time.CONTENDERS if w not in needs or has(needs[w])]
    return {way: runs(way) for way in found}


def keras_systems() -> dict[str, Callable[[argparse.Namespace], dict[str, float]]]:
    def runs(way: str) -> Callable[[argparse.Namespace], dict[str, float]]:
        def run(args: argparse.Namespace) -> dict[str, float]:
            steps = argparse.Namespace(np=2, steps=args.steps)
            return {"seconds": keras_time.job(way, steps)}

        return run

    order = ["horovod", "stage 1", "stage 2", "fit, stage 2", "stage 3, recompute=False", "stage 3"]
    return {way: runs(way) for way in order}


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def measure(args: argparse.Namespace) -> Rounds:
    """Run every system once per round."""
    systems = {f"PyTorch/{way}": run for way, run in torch_systems().items()}
    systems |= {f"Keras/{way}": run for way, run in keras_systems().items()}
    rounds: Rounds = json.loads(RAW.read_text()) if args.go_on and RAW.exists() else []
    RAW.parent.mkdir(exist_ok=True)
    for number in range(args.rounds):
        if number == len(rounds):
            rounds.append({})
        for name, run in systems.items():
            if name in rounds[number]:
                continue
            try:
                found = run(args)
            except SystemExit as error:  # a system that fails does not end the others
                print(f"round {number + 1}, {name} has failed: {error}", flush=True)
                continue
            rounds[number][name] = found
            RAW.write_text(json.dumps(rounds))
            print(f"round {number + 1}, {name}: {1e3 * found['seconds']:.0f} ms", flush=True)
    return rounds


# -- the rest --------------------------------------------------------------------------------------


def run_others(args: argparse.Namespace) -> list[tuple[Other, str, str]]:
    """Each with its command and how it went; one that fails does not end the others."""
    found = []
    for other in OTHERS:
        if args.quick and other.quick is None:
            continue
        script, *options = [*other.argv, *(other.quick or [] if args.quick else [])]
        command = [sys.executable, str(HERE / script), *options]
        said = " ".join(["python", f"benchmarks/{script}", *options])
        said = f"mpirun -np {other.ranks} --bind-to none {said}" if other.ranks else said
        print(f"== {said}", flush=True)
        start = time.monotonic()
        if other.ranks:
            done = launch(other.ranks, command, timeout=3600, env=ONE_THREAD, echo=True)
            ok = done.ok
        else:
            ok = subprocess.run(command, check=False).returncode == 0
        seconds = time.monotonic() - start
        found.append((other, said, f"{seconds:.0f} s" if ok else "**failed**"))
    return found


# -- what is written -------------------------------------------------------------------------------


def series(rounds: Rounds, group: str, key: str) -> dict[str, list[float]]:
    """System -> its values, one per round that has it."""
    prefix = f"{group}/"
    names = [n.removeprefix(prefix) for n in rounds[0] if n.startswith(prefix)]
    return {
        name: [r[prefix + name][key] for r in rounds if key in r.get(prefix + name, {})]
        for name in names
    }


def ratios(rounds: Rounds, group: str, key: str) -> dict[str, list[float]]:
    """The same, each value of a round divided by Horovod's in it."""
    base = f"{group}/horovod"
    return {
        name: [
            r[f"{group}/{name}"][key] / r[base][key]
            for r in rounds
            if f"{group}/{name}" in r and base in r
        ]
        for name in series(rounds, group, key)
    }


def table(rounds: Rounds, group: str) -> list[str]:
    relative = ratios(rounds, group, "seconds")
    memory = series(rounds, group, "bytes")
    with_memory = any(memory.values())
    more = (" peak bytes/parameter |", "---|") if with_memory else ("", "")
    lines = [f"| | ms per step | range | of Horovod's | range |{more[0]}"]
    lines.append(f"|---|---|---|---|---|{more[1]}")
    for name, seconds in series(rounds, group, "seconds").items():
        row = f"| {name} | {_middle(seconds, 1e3, '.0f')} | {_middle(relative[name], 1, '.2f')} |"
        if with_memory:
            row += f" {statistics.median(memory[name]):.1f} |"
        lines.append(row)
    return lines


def _middle(values: Sequence[float], factor: float, form: str) -> str:
    low, middle, high = (factor * f(values) for f in (min, statistics.median, max))
    return f"{middle:{form}} | {low:{form}} - {high:{form}}"


def draw(rounds: Rounds) -> None:
    folder = ROOT / "docs/assets"  # where the site finds them too
    torch_titles = {
        "seconds": "PyTorch, step time, of Horovod's",
        "bytes": "PyTorch, peak memory, bytes per parameter",
    }

    def ours(name: str) -> bool:
        return name.startswith(("zero", "stage", "fit"))

    plots.bars(
        folder / "bench-torch-time.svg",
        torch_titles["seconds"],
        ratios(rounds, "PyTorch", "seconds"),
        lambda v: f"{v:.2f}",
        ours,
    )
    plots.bars(
        folder / "bench-torch-memory.svg",
        torch_titles["bytes"],
        series(rounds, "PyTorch", "bytes"),
        lambda v: f"{v:.1f}",
        ours,
    )
    plots.bars(
        folder / "bench-keras-time.svg",
        "Keras, step time, of Horovod's",
        ratios(rounds, "Keras", "seconds"),
        lambda v: f"{v:.2f}",
        ours,
    )


def versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    mpirun = shutil.which("mpirun")
    if mpirun:
        said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
        found.append((said.stdout.splitlines() or ["mpirun"])[0])
    return [*found, f"Python {platform.python_version()}"]


def machine() -> str:
    cpus = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    name = cpus[0].partition(":")[2].strip() if cpus else platform.machine()
    return f"{os.cpu_count()} cores ({name}), Linux {platform.release()}"


def write(rounds: Rounds, others: Sequence[tuple[Other, str, str]], args: Any) -> None:
    draw(rounds)
    left_out = sorted({m for m in torch_time.NEEDS.values() if not has(m)})
    full = "" if not args.quick else " (`QUICK=1`: few rounds, so a rough picture)"
    lines = [
        "# Results of `make bench`",
        "",
        f"Written by `python benchmarks/run.py --rounds {args.rounds} --steps {args.steps}"
        f"{' --quick' * args.quick}` on {time.strftime('%Y-%m-%d')}{full}. {machine()}. "
        f"{', '.join(versions())}.",
        "",
        "Two ranks with one thread each; every system in processes of its own in every round, the "
        f"systems of a round one after the other. Medians of {len(rounds)} rounds and their "
        "range; ratios are taken per round."
        + (f" Not installed, and so left out: {', '.join(left_out)}." if left_out else ""),
        "",
        "## PyTorch: a step of a GPT with 33.6 M parameters, fused AdamW, float32",
        "",
        *table(rounds, "PyTorch"),
        "",
        "![PyTorch, step time](../docs/assets/bench-torch-time.svg)",
        "",
        "![PyTorch, peak memory](../docs/assets/bench-torch-memory.svg)",
        "",
        "## Keras: a step of a transformer, Adam, float32",
        "",
        *table(rounds, "Keras"),
        "",
        "![Keras, step time](../docs/assets/bench-keras-time.svg)",
        "",
        "## Everything else",
        "",
        "| what | command | took |",
        "|---|---|---|",
        *(f"| {other.what} | `{said}` | {took} |" for other, said, took in others),
        "",
        "What each has found is in its file in `results/`, and was printed.",
    ]
    (HERE / "RESULTS.md").write_text("\n".join(lines) + "\n")
    print(f"written: {HERE / 'RESULTS.md'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less than ten minutes")
    parser.add_argument("--rounds", type=int, help="5; with --quick 1")
    parser.add_argument("--steps", type=int, help="timed steps of a job: 10; with --quick 6")
    parser.add_argument("--go-on", action="store_true", help="after an interruption")
    parser.add_argument("--only-steps", action="store_true", help="step times and nothing else")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.steps = args.steps or (6 if args.quick else 10)
    rounds = measure(args)
    others = [] if args.only_steps else run_others(args)
    write(rounds, others, args)
    return int(any("failed" in took for _, _, took in others))


if __name__ == "__main__":
    sys.exit(main())
