"""`zerohvd plan`: will it fit, which stage, how fast. Nothing is allocated and nothing is sent.

Exit code 0; 1 when nothing fits into --memory; 2 for what cannot be planned.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from zerohvd.checkpoint import CheckpointError
from zerohvd.planning import network as networks
from zerohvd.planning.plan import Plan, make_plan
from zerohvd.planning.sizes import parse_bytes, parse_count, parse_ranks
from zerohvd.planning.workload import PRECISIONS, Wishes, Workload, from_numbers
from zerohvd.tools.planner import plot, sources, table

_WIDTH_WITHOUT_TERMINAL = 160
T = TypeVar("T")


def add_parser(subparsers: Any) -> None:
    """Add the `plan` command to the `zerohvd` command line."""
    parser = subparsers.add_parser(
        "plan",
        help="how much memory each stage needs per rank",
        description=(
            "Shows what every stage holds and moves per rank, before the run. The model is a "
            "function that makes it (mypackage.model:make_model), a checkpoint folder, a "
            ".safetensors file, or --params. It is built without memory. Exit code 1 when no "
            "stage fits into --memory."
        ),
    )
    add = parser.add_argument
    add("model", nargs="?", help="package.module:function, a checkpoint folder or .safetensors")
    add("--params", type=_as(parse_count), metavar="N", help="a number of parameters: 7.5e9, 350M")
    add("--layers", type=int, metavar="N", help="with --params: how many units it has")
    add("--ranks", type=_as(parse_ranks), default=(8,), metavar="N,N", help="8,16,64 (8)")
    add("--memory", type=_as(_memory), metavar="SIZE", help="of one rank: 16GiB, 40GB")
    add("--optimizer", default="adamw", metavar="NAME", help="adamw, adam, momentum, sgd, ... "
        "(adamw)")  # fmt: skip
    add("--precision", choices=list(PRECISIONS), help="mixed: 16-bit with a float32 master")
    add("--batch", type=_as(_batch), metavar="SHAPE", help="of one rank's micro-batch, to measure "
        "activations: 4x1024, 8x3x224x224, 4x1024:int64")  # fmt: skip
    add("--loss", metavar="MODULE:FUNCTION", help="of the model's output; its sum unless given")
    add("--framework", choices=("torch", "keras"), help="of the model, where both are imported")
    add("--network", type=Path, metavar="FILE", help="of `zerohvd doctor --run N --bandwidth`")
    add("--bandwidth", type=float, metavar="GBIT", help="Gbit/s of each rank, instead of --network")
    add("--latency", type=float, default=20.0, metavar="µS", help="with --bandwidth (20)")
    add("--compute", type=float, metavar="SECONDS", help="of a step without communication")
    add("--json", action="store_true", help="print one JSON document instead")
    add("--plot", type=Path, metavar="FILE", help="draw bars per stage: out.png, out.svg")
    parser.set_defaults(run=run)


def _as(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The same for argparse, which shows the message of no other error."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _memory(text: str) -> str:
    parse_bytes(text)
    return text


def _batch(text: str) -> tuple[tuple[int, ...], str | None]:
    shape, _, dtype = text.partition(":")
    parts = shape.lower().split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"expected a shape such as 4x1024 or 4x1024:int64, got {text!r}")
    return tuple(map(int, parts)), dtype or None


def run(args: argparse.Namespace) -> int:
    """Plan, show, and say by the exit code whether anything fits."""
    try:
        plan = _plan(args)
        if args.plot is not None:
            plot.draw(plan, args.plot)
    except (ValueError, TypeError, OSError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(plan.as_dict(), indent=1))
    else:
        table.show(plan, _console())
    return 1 if plan.fits is False else 0


def _plan(args: argparse.Namespace) -> Plan:
    return make_plan(
        _workload(args),
        args.ranks,
        memory=args.memory,
        network=_network(args),
        compute=args.compute,
    )


def _workload(args: argparse.Namespace) -> Workload:
    if (args.model is None) == (args.params is None):
        raise ValueError(
            "give either a model (mypackage.model:make_model, a checkpoint folder, a .safetensors "
            "file) or --params 7.5e9"
        )
    if args.params is not None:
        for name in ("batch", "loss", "framework"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} needs a model, and --params gives a number")
        return from_numbers(
            args.params,
            precision=args.precision or "fp32",
            optimizer=args.optimizer,
            layers=args.layers,
        )
    if args.layers is not None:
        raise ValueError("--layers goes with --params: a model has units of its own")
    batch, dtype = args.batch or (None, None)
    wishes = Wishes(
        optimizer=args.optimizer.lower(),
        precision=args.precision,
        batch=batch,
        batch_dtype=dtype,
        loss=None if args.loss is None else sources.load_function(args.loss),
    )
    return sources.find(args.model, wishes, args.framework)


def _network(args: argparse.Namespace) -> networks.Network | None:
    if args.bandwidth is not None:
        if args.network is not None:
            raise ValueError("give either --network or --bandwidth")
        return networks.of_bandwidth(args.bandwidth, args.latency * 1e-6)
    if args.network is not None:
        return networks.load(args.network)
    stored = networks.default_file(os.environ)
    return networks.load(stored) if stored.exists() else None


def _console() -> Console:
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return Console(highlight=False)
    return Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)
