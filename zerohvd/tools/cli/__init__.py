"""The `zerohvd` command.

Each sub-command is a module of this package with `add_parser(subparsers)` and `run(args) -> int`.
Only the one that was asked for is imported, so that `zerohvd --help` answers at once and a
sub-command whose requirements are missing does not take the others with it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence

from zerohvd._version import __version__

# In the order in which a user meets them.
_COMMANDS = {
    "horovod": "build and install a Horovod that fits this environment",
    "doctor": "check the installation and the cluster, and say how to fix what is wrong",
    "run": "start a job, and start it again from memory if it fails",
    "plan": "how much memory each stage needs per rank",
    "submit": "a job script for Slurm, PBS or LSF",
    "report": "a page with the plots of a run",
    "trace": "one trace of those that the ranks have written",
    "checkpoint": "look into checkpoints, convert and compare them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    try:
        parser = _parser(wanted)
    except ImportError as error:
        print(
            f"error: `zerohvd {wanted}` cannot start: {error}\n"
            f"Install what is missing, or reinstall: pip install --force-reinstall zerohvd",
            file=sys.stderr,
        )
        return 1
    args = parser.parse_args(arguments)
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _parser(wanted: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zerohvd", description="ZeRO for Horovod.")
    parser.add_argument("--version", action="version", version=f"zerohvd {__version__}")
    subparsers = parser.add_subparsers(metavar="command", title="commands")
    for name, summary in _COMMANDS.items():
        module = f"{__name__}.{name}"
        if importlib.util.find_spec(module) is None:
            continue
        if name == wanted:
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser
