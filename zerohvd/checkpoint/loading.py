"""What both adapters do when they load, whatever the framework."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zerohvd.checkpoint.errors import together
from zerohvd.collectives import Collectives


def check_together(
    collectives: Collectives, path: str | os.PathLike[str], check: Callable[[], str]
) -> None:
    """Let every rank check what it is about to read, and go on only if all is well everywhere.

    Args:
        collectives: The ranks.
        path: The checkpoint, for errors.
        check: Returns the id of what was found; changes nothing.
    """
    _, ids = together(collectives, "check", check)
    # Every rank sees the same ids, so all of them take the same branch.
    if len(set(ids)) > 1:
        raise ValueError(
            f"the ranks found different checkpoints at {path}: it must lie on a file system that "
            "all ranks share, and not be replaced while it is being loaded"
        )


def refuse_names(missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Raise unless both are empty.

    Args:
        missing: What the model has and the checkpoint lacks.
        unknown: What the checkpoint has and the model lacks.
    """
    said = [
        f"the {what} {len(names)} tensors that the {other} lacks (the first: {names[0]!r})"
        for names, what, other in (
            (missing, "model has", "checkpoint"),
            (unknown, "checkpoint has", "model"),
        )
        if names
    ]
    if said:
        raise ValueError(
            f"{' and '.join(said)}. Load it into the model it was saved from, or pass strict=False "
            "to load what they have in common"
        )


def generators() -> dict[str, Any]:
    """The states of Python's and numpy's random number generators."""
    version, internal, gauss = random.getstate()
    return {
        "python": [version, np.array(internal, np.uint64), gauss],
        "numpy": list(np.random.get_state()),
    }


def restore_generators(stored: Mapping[str, Any]) -> None:
    """Go on where `generators` was called."""
    version, internal, gauss = stored["python"]
    random.setstate((version, tuple(int(i) for i in internal), gauss))
    np.random.set_state(tuple(stored["numpy"]))
