"""`zerohvd run`: start a job, and start it again if it fails."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from zerohvd.elastic import supervisor


def add_parser(subparsers: Any) -> None:
    """Add the `run` command to the `zerohvd` command line."""
    parser = subparsers.add_parser(
        "run",
        help="start a job, and start it again from memory if it fails",
        usage="zerohvd run [options] -- command ...",
        description=(
            "Starts a command such as `mpirun -np 4 python train.py`, and starts it again when it "
            "fails. What the script has committed (zero.elastic) is kept in the memory of the "
            "hosts meanwhile, and read from there: no disk is used."
        ),
    )
    parser.add_argument(
        "--restarts", type=int, default=3, help="how often to start again; default: 3"
    )
    parser.add_argument(
        "--hosts",
        help="hosts and their ranks, as in a:4,b:4. They are looked for before each start, and "
        "{hosts} and {np} in the command say which are left",
    )
    parser.add_argument(
        "--min-np", type=int, default=1, help="with --hosts: end if fewer ranks are left"
    )
    parser.add_argument(
        "--probe",
        default=supervisor.PROBE,
        help="with --hosts: a command whose exit code says whether {host} is alive; default: "
        f"{supervisor.PROBE}",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="behind --: what to start")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `zerohvd run`."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        if not command:
            raise ValueError("what to start is missing: zerohvd run -- mpirun -np 4 python ...")
        if args.restarts < 0:
            raise ValueError(f"--restarts must be 0 or more, got {args.restarts}")
        hosts = None if args.hosts is None else supervisor.parse_hosts(args.hosts)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    job = supervisor.Job(command, args.restarts, hosts, args.min_np, args.probe)
    return supervisor.run(job, lambda line: print(f"zerohvd run: {line}", file=sys.stderr))
