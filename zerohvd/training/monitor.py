"""Monitored metrics: all ranks take the same decision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zerohvd.communication.collectives import Collectives


def check_mode(mode: str) -> str:
    """Return `mode`; raise ValueError unless it is "min" or "max"."""
    if mode not in ("min", "max"):
        raise ValueError(f'mode must be "min" or "max", got {mode!r}')
    return mode


def improvement(
    logs: Mapping[str, Any], monitor: str, best: float | None, mode: str, ranks: Collectives
) -> float | None:
    """Return the monitored value if it is better than `best`, else None; all ranks must call it.

    All of them follow rank 0: what comes next, such as saving, they must all do or none. NaN is
    never better: nothing would be better than NaN ever after.
    """
    if monitor not in logs:
        raise ValueError(f"Checkpoint monitors {monitor!r}, but the metrics are {sorted(logs)}")
    value = float(ranks.broadcast_object(float(logs[monitor]), name="zero/monitor"))
    better = best is None or (value < best if mode == "min" else value > best)
    return value if better and not math.isnan(value) else None
