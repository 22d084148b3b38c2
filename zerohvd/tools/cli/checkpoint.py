"""`zerohvd checkpoint`: look into checkpoints, convert, verify and compare them.

None of these needs ranks, a framework, or more memory than the largest tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from zerohvd.checkpoint import CheckpointError, Manifest, Reader
from zerohvd.checkpoint.errors import reading
from zerohvd.checkpoint.offline.compare import differences
from zerohvd.checkpoint.offline.consolidate import SUFFIXES, WriteWeights, consolidate, weights
from zerohvd.tools.adapters import AdapterNotFoundError, load_adapter

_WIDTH_WITHOUT_TERMINAL = 120
TORCH_SUFFIXES = (".pt", ".pth", ".bin")


def add_parser(subparsers: Any) -> None:
    """Add the `checkpoint` command to the `zerohvd` command line."""
    parser = subparsers.add_parser(
        "checkpoint", help="look into checkpoints, convert and compare them"
    )
    actions = parser.add_subparsers(metavar="action", title="actions", required=True)

    action = actions.add_parser("inspect", help="what is in a checkpoint")
    action.add_argument("dir", type=Path, metavar="DIR")
    action.add_argument("--json", action="store_true", help="print one JSON document instead")
    action.set_defaults(run=_guarded(_inspect))

    action = actions.add_parser(
        "consolidate",
        help="write the weights into one plain file",
        description="Writes the model's weights into one file. Its suffix says which kind: "
        f"{', '.join([*SUFFIXES, *TORCH_SUFFIXES])}.",
    )
    action.add_argument("dir", type=Path, metavar="DIR")
    action.add_argument("out", type=Path, metavar="OUT")
    action.add_argument(
        "--masters", action="store_true", help="float32 masters in place of 16-bit parameters"
    )
    action.set_defaults(run=_guarded(_consolidate))

    action = actions.add_parser(
        "verify", help="read every byte and compare checksums", description="Exit code 1 if not."
    )
    action.add_argument("dir", type=Path, metavar="DIR")
    action.set_defaults(run=_guarded(_verify))

    action = actions.add_parser(
        "diff",
        help="what differs between two checkpoints",
        description="Compares values, however they were sharded. Exit code 1 if any differ.",
    )
    action.add_argument("a", type=Path, metavar="A")
    action.add_argument("b", type=Path, metavar="B")
    action.set_defaults(run=_guarded(_diff))


def _guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def guarded(args: argparse.Namespace) -> int:
        try:
            code = run(args)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            # The reader, `head` for one, has seen enough. What is left in the buffer would be
            # written once more when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (CheckpointError, ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return guarded


# -- inspect ---------------------------------------------------------------------------------------


def _inspect(args: argparse.Namespace) -> int:
    with reading(args.dir):
        return _show(Reader.open(args.dir).manifest, args)


def _show(manifest: Manifest, args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(_facts(manifest), indent=1))
        return 0
    console = _console()
    table = Table(title=str(args.dir), title_justify="left", box=None, pad_edge=False)
    for title, justify in (("kind", "left"), ("name", "left"), ("shape", "left"),
                           ("dtype", "left"), ("size", "right"), ("shards", "right")):  # fmt: skip
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for t in sorted(manifest.tensors.values(), key=lambda t: (t.kind != "param", t.kind)):
        shape = " x ".join(map(str, t.shape)) or "scalar"
        table.add_row(t.kind, t.name, shape, t.dtype, _bytes(t.nbytes), str(len(t.parts)))
    console.print(table)
    params = sum(t.numel for t in manifest.of_kind("param"))
    step = "unknown" if manifest.step is None else manifest.step
    console.print(
        f"\n{params:,} parameters, {_bytes(manifest.nbytes)} in {len(manifest.files)} shards; "
        f"step {step}; saved by {manifest.size} ranks of {manifest.framework}, "
        f"{manifest.created}, {manifest.writer}"
    )
    if manifest.config:
        console.print(", ".join(f"{k}={v}" for k, v in manifest.config.items() if v is not None))
    return 0


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "id": manifest.id,
        "framework": manifest.framework,
        "step": manifest.step,
        "size": manifest.size,
        "created": manifest.created,
        "writer": manifest.writer,
        "bytes": manifest.nbytes,
        "config": dict(manifest.config),
        "files": [f._asdict() for f in manifest.files],
        "tensors": {
            t.key: {"dtype": t.dtype, "shape": t.shape, "bytes": t.nbytes, "shards": len(t.parts)}
            for t in manifest.tensors.values()
        },
    }


# -- the others ------------------------------------------------------------------------------------


def _consolidate(args: argparse.Namespace) -> int:
    reader = Reader.open(args.dir)
    total = sum(t.nbytes for t in weights(reader, masters=args.masters).values())
    with _progress(f"writing {args.out.name}", total) as each:
        others = _torch_writers() if args.out.suffix in TORCH_SUFFIXES else {}
        consolidate(args.dir, args.out, masters=args.masters, each=each, others=others)
    print(f"{args.out}: {_bytes(args.out.stat().st_size)}")
    return 0


def _torch_writers() -> Mapping[str, WriteWeights]:
    try:
        return load_adapter("torch").weight_files
    except (ImportError, AdapterNotFoundError) as error:
        raise CheckpointError(
            f"a torch state_dict is written by zerohvd.torch, which cannot be loaded ({error}): "
            "install torch and Horovod for it, or write a .safetensors file"
        ) from error


def _verify(args: argparse.Namespace) -> int:
    reader = Reader.open(args.dir)
    with _progress("verifying", reader.manifest.nbytes) as each:
        problems = list(reader.check_all(each))
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"{args.dir}: {len(problems)} problems", file=sys.stderr)
        return 1
    files = len(reader.manifest.files)
    print(f"{args.dir}: all {_bytes(reader.manifest.nbytes)} in {files} shards are as written")
    return 0


def _diff(args: argparse.Namespace) -> int:
    a, b = Reader.open(args.a), Reader.open(args.b)
    with _progress("comparing", a.manifest.nbytes) as each:
        found = list(differences(a, b, each))
    for difference in found:
        print(f"{difference.what}: {difference.how}")
    print(f"{len(found)} differences" if found else "no differences")
    return 1 if found else 0


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal; nothing in pipes and logs."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
               TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def _console() -> Console:
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return Console(highlight=False)
    return Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
