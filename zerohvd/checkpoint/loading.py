"""What both adapters do when they save and load, whatever the framework."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zerohvd.checkpoint.errors import together
from zerohvd.checkpoint.manifest import TensorInfo
from zerohvd.checkpoint.reader import Reader
from zerohvd.communication.collectives import Collectives

# Kinds of tensors that belong to what is no tensor: of all ranks, and of one.
SHARED, OWN = "shared", "own"


def read_together(
    collectives: Collectives, path: str | os.PathLike[str], read: Callable[[], str]
) -> None:
    """Let every rank read what it needs, and go on only if all was well everywhere.

    Args:
        collectives: The ranks.
        path: The checkpoint, for errors.
        read: Returns the id of what was found; changes nothing that anybody uses.
    """
    _, ids = together(collectives, "read", read)
    # Every rank sees the same ids, so all of them take the same branch.
    if len(set(ids)) > 1:
        raise ValueError(
            f"the ranks found different checkpoints at {path}: it must lie on a file system that "
            "all ranks share, and not be replaced while it is being loaded"
        )


def states(
    reader: Reader,
    framework: str,
    collectives: Collectives,
    make: Callable[[TensorInfo, Any], Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all ranks had in common when they saved, and what this one had for itself.

    The latter is empty where the number of ranks is not that of the save.

    Args:
        reader: The checkpoint.
        framework: That it must have been saved by.
        collectives: The ranks.
        make: Makes the arrays of a framework from their bytes.
    """
    manifest = reader.manifest
    if manifest.framework != framework:
        raise ValueError(
            f"the checkpoint was saved by {manifest.framework}, not by {framework}. "
            "`zerohvd checkpoint consolidate` makes plain weights of it"
        )
    own: dict[str, Any] = {}
    if len(manifest.rank_states) == collectives.size:
        own = reader.decode(manifest.rank_states[collectives.rank], OWN, make)
    return reader.decode(manifest.state, SHARED, make), own


def training_step(extra: Any, step: int | None, counted: Callable[[], int | None]) -> int | None:
    """What a manifest calls the step: as given, as in `extra`, or as the optimizer counted."""
    if step is not None:
        return int(step)
    if isinstance(extra, Mapping) and isinstance(extra.get("step"), int):
        return int(extra["step"])
    return counted()


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
