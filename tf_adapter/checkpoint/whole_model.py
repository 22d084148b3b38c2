"""Whole models on disk, written by one rank with the state of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerohvd.communication.collectives import Collectives
from zerohvd.errors import ZeroError
from zerohvd.keras.optimizer import state
from zerohvd.keras.optimizer.distributed import optimizer_of, ranks_of


def save_model(model: Any, filepath: Any, *, root: int = 0, **options: Any) -> None:
    """`model.save` for a model whose optimizer state is sharded; all ranks must call it.

    Rank `root` collects the state and writes. `keras.models.load_model` reads it at any number of
    ranks, and in a process without Horovod; for training, all ranks have to load it.

    Args:
        model: A compiled model.
        filepath: As for `model.save`.
        root: The rank that writes.
        **options: Passed on to `model.save`.
    """
    optimizer = optimizer_of(model)
    whole = None
    if optimizer is not None and optimizer.step is not None:
        whole = state.whole_state(optimizer, root)

    def write() -> None:
        if optimizer is not None:
            optimizer.saved_state = whole
        try:
            model.save(filepath, **options)
        finally:
            if optimizer is not None:
                optimizer.saved_state = None

    on_one_rank(write, ranks_of(model), root)


def on_one_rank(function: Callable[[], None], collectives: Collectives, root: int = 0) -> None:
    """Run `function` on rank `root` while the others wait; an error is raised on all of them."""
    error: Exception | None = None
    if collectives.rank == root:
        try:
            function()
        except Exception as caught:  # every rank hears of it below
            error = caught
    text = collectives.broadcast_object(
        None if error is None else f"{type(error).__name__}: {error}", root, name="zero/saved"
    )
    if error is not None:
        raise error
    if text is not None:
        raise ZeroError(f"rank {root} could not save: {text}")
