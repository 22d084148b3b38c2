"""Private names of torch that the adapter cannot do without, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# -- checkpoints -----------------------------------------------------------------------------------


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The model that torch.compile has wrapped, or the model itself.

    `_orig_mod` is in the names of a compiled model's state_dict, so torch keeps it; no public name
    leads to it (torch 2.6 to 2.13). Without it every name would have a prefix that the plain
    model's have not.
    """
    found = getattr(model, "_orig_mod", model)
    assert isinstance(found, torch.nn.Module)
    return found


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of a module itself that a state_dict holds.

    `_non_persistent_buffers_set` is the only record of `register_buffer(persistent=False)` (torch
    2.6 to 2.13); `state_dict()` would copy whole models at stage 3. Without it buffers that the
    user wants in no file would be stored.
    """
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer
