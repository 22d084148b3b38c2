"""The random number generators of a rank."""

from __future__ import annotations

from typing import Any

import torch

from zerohvd.checkpoint import loading


def states() -> dict[str, Any]:
    """The states of the generators that a training script draws from."""
    found = {**loading.generators(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(stored: dict[str, Any]) -> None:
    """Go on where `states` was called."""
    loading.restore_generators(stored)
    torch.set_rng_state(stored["torch"])
    if "cuda" in stored and torch.cuda.is_available():
        torch.cuda.set_rng_state(stored["cuda"])
