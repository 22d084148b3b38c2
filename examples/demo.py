"""What `make demo` runs: both frameworks, trained for real on two ranks.

    python examples/demo.py

Each job is started by horovodrun, as a user would start it. The table compares what a rank held
with what plain Horovod holds: all parameters, all gradients and Adam's two moments of each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zerohvd.launching import launch_environment, run_to_the_end
from zerohvd.memory import format_bytes

HERE = Path(__file__).resolve().parent
JOBS = {"PyTorch, GPT": "torch_gpt.py", "Keras 3, model.fit": "keras_fit.py"}
RANKS = 2
TIMEOUT = 600.0


def train(script: str, summary: Path) -> dict:
    horovodrun = str(Path(sys.executable).parent / "horovodrun")
    argv = [horovodrun, "-np", str(RANKS), sys.executable, str(HERE / script)]
    print(f"$ horovodrun -np {RANKS} python examples/{script} --stage 2", flush=True)
    result = run_to_the_end(
        [*argv, "--stage", "2", "--summary", str(summary)],
        timeout=TIMEOUT,
        env=launch_environment(),
        echo=True,
    )
    if not result.ok or not summary.exists():
        raise SystemExit(f"{result.explain()}\n`zerohvd doctor --run 2` may know why.")
    return json.loads(summary.read_text())


def main() -> None:
    table = Table(title=f"ZeRO stage 2 on {RANKS} ranks: bytes per rank (plain Horovod's)")
    for column in ("job", "parameters", "loss", "params", "gradients", "optimizer state"):
        table.add_column(column, justify="left" if column == "job" else "right")
    with tempfile.TemporaryDirectory() as folder:
        for job, script in JOBS.items():
            done = train(script, Path(folder, f"{script}.json"))
            plain = {"params": 4, "grads": 4, "optimizer": 8}  # bytes per float32 parameter
            cells = [
                f"{format_bytes(done['held'][key])} ({format_bytes(each * done['params'])})"
                for key, each in plain.items()
            ]
            loss = f"{done['before']:.3f} -> {done['after']:.3f}"
            table.add_row(job, f"{done['params']:,}", loss, *cells)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
