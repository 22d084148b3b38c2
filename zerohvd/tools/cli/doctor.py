"""`zerohvd doctor`: what is installed, whether it fits together, and (`--run N`) whether it works.

Exit code 0 when nothing fails (warnings allowed), else 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from zerohvd import launchers, versions
from zerohvd.launching import LaunchError, find_mpirun
from zerohvd.planning.network import default_file
from zerohvd.tools.doctor import bandwidth, machine, probes, run_check
from zerohvd.tools.doctor.diagnosis import Evidence, diagnose
from zerohvd.tools.doctor.report import Grid, Line, Report, Status

_FRAMEWORKS = ("torch", "tensorflow")
_MODULES = ("torch", "tensorflow", "keras", "horovod", "mpi4py")
# Room for a command on one line, in logs and pipes too.
_WIDTH_WITHOUT_TERMINAL = 120


def add_parser(subparsers: Any) -> None:
    """Add the `doctor` command to the `zerohvd` command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check the installation and the cluster, and say how to fix what is wrong",
        description=(
            "Shows what is installed, what Horovod was built for, which MPI everything loads and "
            "which launcher started this process. With --run N, also starts N ranks on this "
            "machine and checks each collective with each dtype. Also useful as "
            "`mpirun -np 2 zerohvd doctor` or `srun zerohvd doctor`, where it tells whether "
            "Horovod sees the ranks that the launcher started. Exit code 1 if a line fails."
        ),
    )
    parser.add_argument(
        "--run", dest="ranks", type=_ranks, default=0, metavar="N", help="start N ranks"
    )
    parser.add_argument(
        "--bandwidth",
        action="store_true",
        help="with --run: measure latency and bandwidth of each collective, for `zerohvd plan`",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="with --bandwidth: where to store them (where `zerohvd plan` looks)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long one look may take, and each of the runs three times as long (60)",
    )
    parser.set_defaults(run=run)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of ranks, 1 or more, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Look, run, report; on one rank only, whatever started them."""
    if args.bandwidth and args.ranks < 2:
        print("error: --bandwidth needs at least two ranks: --run 2", file=sys.stderr)
        return 2
    launcher = launchers.detect(os.environ)
    if not launcher.is_first:
        # Horovod starts only if all ranks start it.
        probes.run_world(args.timeout)
        return 0
    evidence = gather(launcher, args.ranks, args.timeout)
    lines, grids = list(diagnose(evidence)), list[Grid]()
    if args.ranks:
        run_lines, grids = _run_ranks(evidence, args.ranks, 3 * args.timeout)
        lines += run_lines
        if args.bandwidth and all(line.status is not Status.FAIL for line in run_lines):
            path = args.save or default_file(os.environ)
            framework = next(fw for fw in _FRAMEWORKS if _usable(evidence, fw))
            lines += bandwidth.run(framework, args.ranks, path, 3 * args.timeout)
    report = Report(tuple(lines), tuple(grids))
    if args.json:
        print(report.to_json(**_facts(evidence)))
    else:
        report.print(_console())
    return report.exit_code


def gather(launcher: launchers.Launcher, ranks: int, timeout: float) -> Evidence:
    """Look at everything; the slow looks at the same time."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        mpirun = pool.submit(_mpirun)
        findings = probes.run_all(timeout)
        against = versions.horovod_built_against()
        return Evidence(
            launcher=launcher,
            machine=machine.look(),
            installed={module: versions.find(module) for module in _MODULES},
            horovod_built={fw: against.get(fw, "") for fw in versions.horovod_frameworks()},
            keras_backend=versions.keras_backend(),
            findings=findings,
            mpirun=mpirun.result(),
            environ=dict(os.environ),
            ranks=ranks,
        )


def _mpirun() -> Path | str:
    try:
        return find_mpirun()
    except LaunchError as error:
        return str(error)


def _run_ranks(evidence: Evidence, ranks: int, timeout: float) -> tuple[list[Line], list[Grid]]:
    if evidence.launcher.launched:
        found = f"--run starts its own ranks, and {evidence.launcher.name} has started this one"
        fix = f"run `zerohvd doctor --run {ranks}` without a launcher"
        return [Line("run", Status.FAIL, found, fix)], []
    usable = [fw for fw in _FRAMEWORKS if _usable(evidence, fw)]
    if not usable:
        found = "no ranks were started: there is no framework with a Horovod that works"
        return [Line("run", Status.FAIL, found, "fix the lines above first")], []
    results = [run_check.run(framework, ranks, timeout) for framework in usable]
    return [line for r in results for line in r.lines], [r.grid for r in results]


def _usable(evidence: Evidence, framework: str) -> bool:
    finding = evidence.findings.get(f"horovod.{framework}")
    return finding is not None and finding.ok


def _facts(evidence: Evidence) -> dict[str, Any]:
    """What a machine wants to know beyond the lines."""
    return {
        "launcher": dataclasses.asdict(evidence.launcher),
        "machine": dataclasses.asdict(evidence.machine),
        "libmpi": evidence.libmpi,
        "found": {part: dict(finding.data) for part, finding in evidence.findings.items()},
    }


def _console() -> Console:
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return Console(highlight=False)
    return Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)
