"""`zerohvd submit`: a job script for Slurm, PBS or LSF, printed or handed in.

Exit code 0; 1 when the scheduler did not take it; 2 for what was not understood.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from zerohvd import launching
from zerohvd.tools.submit.scripts import SCHEDULERS, Job


def add_parser(subparsers: Any) -> None:
    """Add the `submit` command to the `zerohvd` command line."""
    parser = subparsers.add_parser(
        "submit",
        help="a job script for Slurm, PBS or LSF",
        description=(
            "Writes a commented job script that starts a command on several nodes, with what MPI "
            "and Horovod need, a signal before its time is up, and another start after that. "
            "--print shows it; otherwise it is handed to sbatch, qsub or bsub."
        ),
    )
    add = parser.add_argument
    add("--scheduler", choices=list(SCHEDULERS), help="the one that is installed, unless given")
    add("--nodes", type=int, default=1, metavar="N", help="(1)")
    add("--ranks-per-node", type=int, required=True, metavar="N", help="GPUs of a node, if any")
    add("--cpus-per-rank", type=int, default=2, metavar="N", help="for its threads (2)")
    add("--gpus-per-node", type=int, default=0, metavar="N", help="(0)")
    add("--time", metavar="H:MM:SS", help="as in 24:00:00; the queue's own unless given")
    add("--warning", type=int, default=120, metavar="SECONDS", help="SIGUSR1 that long before the "
        "end: twice as long as a checkpoint takes, or more (120)")  # fmt: skip
    add("--name", help="of the job; that of the Python script unless given")
    add("--queue", "--partition", dest="queue", help="of the scheduler")
    add("--account", help="or project")
    add("--print", action="store_true", help="print the script, and submit nothing")
    add("command", nargs=argparse.REMAINDER, help="-- python train.py ...")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the script, and hand it in."""
    try:
        command, write = SCHEDULERS[args.scheduler or _installed()]
        script = write(_job(args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.print:
        print(script, end="")
        return 0
    if shutil.which(command) is None:
        print(f"error: no {command} on PATH; --print shows the script", file=sys.stderr)
        return 1
    done = subprocess.run([command], input=script, text=True, check=False)
    return 1 if done.returncode else 0


def _job(args: argparse.Namespace) -> Job:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    libmpi = launching.horovod_libmpi()
    here = Path(sys.executable).parent
    return Job(
        command=command,
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        cpus_per_rank=args.cpus_per_rank,
        gpus_per_node=args.gpus_per_node,
        time=args.time,
        name=args.name or _name(command),
        queue=args.queue,
        account=args.account,
        warning=args.warning,
        mpi=_kind(libmpi),
        wheel=libmpi is not None and libmpi.is_relative_to(sys.prefix),
        path=here,
    )


def _kind(libmpi: Path | None) -> str | None:
    if libmpi is None:
        return None
    return "openmpi" if libmpi.name.startswith("libmpi.so.40") else "mpich"


def _name(command: list[str]) -> str:
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    return scripts[0] if scripts else "train"


def _installed() -> str:
    for scheduler, (command, _) in SCHEDULERS.items():
        if shutil.which(command) is not None:
            return scheduler
    raise ValueError("no sbatch, qsub or bsub on PATH: say which, as in --scheduler slurm")
