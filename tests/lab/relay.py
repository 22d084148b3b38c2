"""A training that is handed from launcher to launcher: data, and what each leg leaves behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 12  # of a step, all ranks together
WIDTH = 33
STAGES = (0, 1, 2, 3)


def data(step: int, rank: int = 0, size: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """The same batch whatever the number of ranks."""
    x = np.random.default_rng(step).normal(size=(SAMPLES, 9)).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True)).astype("float32")
    return x[rank::size], y[rank::size]


def run(
    make: Callable[[int], tuple[Any, Any, Callable[[int], float]]], zero: Any, hvd: Any
) -> None:
    """FOLDER STOP: go on from the last leg's checkpoints, each stage up to step STOP, and save."""
    folder, stop = Path(sys.argv[1]), int(sys.argv[2])
    for stage in STAGES:
        model, opt, step = make(stage)
        manager = zero.CheckpointManager(folder / f"stage{stage}", keep=2)
        done = (manager.restore(model, opt) or {"step": 0})["step"]
        losses = {number: step(number) for number in range(done, stop)}
        manager.save(stop, model, opt, extra={"step": stop})
        if hvd.rank() == 0:
            said = {"stage": stage, "losses": losses, "ranks": hvd.size(), "here": hvd.local_size()}
            with (folder / "legs").open("a") as file:
                file.write(json.dumps(said) + "\n")


def told(folder: Path) -> list[dict[str, Any]]:
    """What the legs so far have written."""
    return [json.loads(line) for line in (folder / "legs").read_text().splitlines()]
