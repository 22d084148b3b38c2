"""Threads of this rank: its share of the cores, unless the user has said otherwise."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from zerohvd import cores


def settle() -> None:
    """For when the adapter is imported: what the user sets afterwards holds."""
    cores.settle(
        torch.get_num_threads(),
        torch.set_num_threads,
        "torch.set_num_threads()",
        is_started=hvd.is_initialized(),
    )
