"""Run the parallel tests: python tests/run_parallel.py [--np 2] [--suite torch] [pytest options]

Each suite is started once per number of ranks, as `mpirun -np N ... pytest`: all ranks run the
same tests in the same order. Rank 0 speaks; what the others said is shown when they fail.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zerohvd.launching import launch

ROOT = Path(__file__).resolve().parent.parent
SUITES = {"torch": "tests/parallel/torch_ranks", "keras": "tests/parallel/keras_ranks"}
SIZES = (1, 2, 3, 4)
TIMEOUT = 1500.0

# A rank that fails alone leaves the others waiting in a collective: Horovod ends them after this.
# Tests of mistakes leave such collectives behind on purpose, so it is longer than a suite takes.
STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "20", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1200"}


def run(suite: str, np: int, options: list[str]) -> bool:
    with tempfile.TemporaryDirectory(prefix="zerohvd-ranks-") as logs:
        env = {
            **STALL,
            "ZEROHVD_TEST_RANKS": logs,
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "HOROVOD_CACHE_CAPACITY": "8192",
            "PYTHONFAULTHANDLER": "1",
        }
        argv = [sys.executable, "tests/parallel/one_rank.py", SUITES[suite], *options]
        print(f"== {suite}, {np} rank{'s' if np > 1 else ''}", flush=True)
        result = launch(np, argv, timeout=TIMEOUT, env=env, cwd=ROOT)
        if result.ok:
            print(result.stdout.rstrip().splitlines()[-1], flush=True)
            return True
        print(result.stdout[-15000:])
        print(result.stderr[-5000:])
        for log in sorted(Path(logs).glob("rank-*.log")):
            print(f"-- {log.stem}\n{log.read_text(errors='replace')[-8000:]}")
        print(result.explain(lines=5).splitlines()[0], flush=True)
        return False


def count_gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return listed.stdout.count("GPU ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--np", type=int, action="append", help="numbers of ranks; default 1-4")
    parser.add_argument("--suite", choices=SUITES, action="append", help="default: all")
    parser.add_argument("--gpus", action="store_true", help="as many ranks as there are GPUs")
    args, options = parser.parse_known_args()
    os.chdir(ROOT)
    sizes = args.np or [n for n in SIZES if not args.gpus or n <= count_gpus()]
    if not sizes:
        print("no GPU: nvidia-smi -L lists none")
        return 1
    start = time.monotonic()
    failed = [
        f"{suite} with {np}"
        for suite in args.suite or SUITES
        for np in sizes
        if not run(suite, np, ["-q", "-p", "no:cacheprovider", *options])
    ]
    print(f"parallel tests: {time.monotonic() - start:.0f} s")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
