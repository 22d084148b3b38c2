"""The random number generators of a rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def states() -> dict[str, Any]:
    """The states of the generators that a training script draws from."""
    version, internal, gauss = random.getstate()
    found = {
        "python": [version, np.array(internal, np.uint64), gauss],
        "numpy": list(np.random.get_state()),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(stored: dict[str, Any]) -> None:
    """Go on where `states` was called."""
    version, internal, gauss = stored["python"]
    random.setstate((version, tuple(int(i) for i in internal), gauss))
    np.random.set_state(tuple(stored["numpy"]))
    torch.set_rng_state(stored["torch"])
    if "cuda" in stored and torch.cuda.is_available():
        torch.cuda.set_rng_state(stored["cuda"])
