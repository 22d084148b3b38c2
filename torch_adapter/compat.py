"""Names of torch and Horovod that are not public, each called in one place.

Tried with torch 2.13 and Horovod 0.28.1. Every entry says why it is needed and what happens
without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# -- GradScaler ----------------------------------------------------------------------------------

# torch.amp.GradScaler.step() asks an optimizer for this attribute. Where it is true the optimizer
# unscales by itself: the scaler sets `grad_scale` and `found_inf` on it and calls step(). A plain
# scaler is recognised by that. Without it, a plain scaler finds no gradients before they have been
# reduced, and fails with "No inf checks were recorded for this optimizer".
_UNSCALES_ITSELF = "_step_supports_amp_scaling"
_SET_BY_SCALER = ("grad_scale", "found_inf")


def unscales_itself(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Let GradScaler leave the scale to `step()` of this class."""
    setattr(optimizer_class, _UNSCALES_ITSELF, True)


@contextlib.contextmanager
def unscaled_by_scaler(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, GradScaler unscales the optimizer's gradients as those of any other."""
    setattr(optimizer, _UNSCALES_ITSELF, False)
    try:
        yield
    finally:
        delattr(optimizer, _UNSCALES_ITSELF)


def take_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler has left its scale to `step()`; what it has set is removed."""
    found = [name for name in _SET_BY_SCALER if name in vars(optimizer)]
    for name in found:
        delattr(optimizer, name)
    return bool(found)
