"""`zerohvd report`: a page with the plots of a run. Exit code 0; 2 for what cannot be read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from zerohvd.tools.reporter import make_page, read_records


def add_parser(subparsers: Any) -> None:
    """Add the `report` command to the `zerohvd` command line."""
    parser = subparsers.add_parser(
        "report",
        help="a page with the plots of a run",
        description=(
            "Makes one HTML file of what zero.Monitor(opt, to='run.jsonl') has written: loss, "
            "time of a step, slow ranks, memory. It loads nothing, and can be sent and printed."
        ),
    )
    parser.add_argument("jsonl", metavar="RUN.jsonl", type=Path, help="written by a Monitor")
    parser.add_argument("--html", type=Path, metavar="FILE", help="where to (RUN.html)")
    parser.add_argument("--title", help="a heading (the file's name)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    try:
        page = make_page(read_records(args.jsonl), args.title or args.jsonl.stem)
        target = args.html or args.jsonl.with_suffix(".html")
        target.write_text(page, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(target)
    return 0
