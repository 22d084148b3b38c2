"""Whole models on disk, written by one rank with the state of all of them."""

from __future__ import annotations

from typing import Any

from zerohvd.checkpoint.errors import on_one_rank
from zerohvd.keras.optimizer import state
from zerohvd.keras.optimizer.distributed import optimizer_of, ranks_of


def save_model(model: Any, filepath: Any, *, root: int = 0, **options: Any) -> None:
    """`model.save` for a model whose optimizer state is sharded; all ranks must call it.

    Rank `root` collects the state and writes. `keras.models.load_model` reads it at any number of
    ranks, and in a process without Horovod; for training, all ranks have to load it.

    Args:
        model: A compiled model.
        filepath: As for `model.save`; a path that ends with `.weights.h5` gets weights alone.
        root: The rank that writes.
        **options: Passed on to `model.save`.
    """
    optimizer = optimizer_of(model)
    whole = None
    weights_alone = str(filepath).endswith(".weights.h5")
    if weights_alone:
        whole = {}
    elif optimizer is not None and optimizer.step is not None:
        whole = state.whole_state(optimizer, root)

    def write() -> None:
        if optimizer is not None:
            optimizer.saved_state = whole
        try:
            if weights_alone:
                model.save_weights(filepath, **options)
            else:
                model.save(filepath, **options)
        finally:
            if optimizer is not None:
                optimizer.saved_state = None

    ranks = ranks_of(model)
    if optimizer is None or optimizer.sharded is None:
        on_one_rank(write, ranks, root)
        return
    # The others help to gather what the writing rank reads.
    reading = optimizer.sharded.units.readable_on(root)

    def read_and_write() -> None:
        with reading:
            write()

    if ranks.rank != root:
        with reading:
            pass
    on_one_rank(read_and_write, ranks, root)
