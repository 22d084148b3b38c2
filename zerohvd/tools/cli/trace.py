"""`zerohvd trace`: the traces of all ranks as one. Exit code 0; 2 for what cannot be read."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from zerohvd.monitoring.trace import merge
from zerohvd.tools.reporter import draw_trace


def add_parser(subparsers: Any) -> None:
    """Add the `trace` command to the `zerohvd` command line."""
    parser = subparsers.add_parser("trace", help="one trace of those that the ranks have written")
    commands = parser.add_subparsers(metavar="command", title="commands", required=True)
    merging = commands.add_parser(
        "merge",
        help="make one file for ui.perfetto.dev or chrome://tracing",
        description=(
            "Every rank of a run with zero.Monitor(opt, trace=FOLDER) or ZEROHVD_TRACE=FOLDER "
            "writes a trace of its steps, waits and collectives. This makes one file of them, with "
            "the clocks of different hosts aligned. A name that ends with .svg gets a picture of "
            "the last steps."
        ),
    )
    merging.add_argument("folder", type=Path, help="where the ranks have written")
    merging.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to (FOLDER/trace.json)"
    )
    merging.add_argument("--ranks", type=_ranks, metavar="R,R", help="only these")
    merging.add_argument("--steps", type=int, default=2, metavar="N", help="of a picture (2)")
    merging.set_defaults(run=run)


def _ranks(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected ranks such as 0,3,7, got {text!r}")
    return [int(part) for part in parts]


def run(args: argparse.Namespace) -> int:
    """Write the merged trace."""
    target = args.output or args.folder / "trace.json"
    try:
        merged = merge(args.folder, args.ranks)
        picture = target.suffix == ".svg"
        text = draw_trace(merged, args.steps) if picture else json.dumps(merged)
        target.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(target if picture else f"{target}: open it in ui.perfetto.dev or chrome://tracing")
    return 0
