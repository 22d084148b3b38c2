"""Python's and numpy's random number generators: their states, and going on from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zerohvd.checkpoint.errors import CheckpointMismatchError
from zerohvd.checkpoint.values.likeness import check_finite

_WORDS = 624  # of a Mersenne twister


def states() -> dict[str, Any]:
    """Of both, as `tree` encodes them."""
    version, internal, gauss = random.getstate()
    return {
        "python": [version, np.array(internal, np.uint64), gauss],
        "numpy": list(np.random.get_state()),
    }


def prepare(stored: Mapping[str, Any]) -> Callable[[], None]:
    """Check what `states` returned once; the result sets the generators, and cannot fail.

    Raises:
        CheckpointMismatchError: It is not the state of a generator.
    """
    acts = [
        tried(name, stored, by)
        for name, by in (("python", _prepare_python), ("numpy", _prepare_numpy))
    ]

    def restore() -> None:
        for act in acts:
            act()

    return restore


def tried(
    name: str, stored: Mapping[str, Any], by: Callable[[Any], Callable[[], None]]
) -> Callable[[], None]:
    """What sets the generator `name`, after it was found that it can be."""
    if not isinstance(stored, Mapping) or name not in stored:
        raise CheckpointMismatchError(f"the checkpoint lacks the generator {name!r}")
    try:
        return by(stored[name])
    except Exception as error:
        raise CheckpointMismatchError(
            f"the checkpoint's state of the generator {name!r} is none: {error}"
        ) from error


def _prepare_python(stored: Any) -> Callable[[], None]:
    version, internal, gauss = stored
    if gauss is not None:
        check_finite(gauss, "its third part")
    state = (version, tuple(int(i) for i in internal), gauss)
    random.Random().setstate(state)
    return lambda: random.setstate(state)


def _prepare_numpy(stored: Any) -> Callable[[], None]:
    state = tuple(stored)
    if state[0] == "MT19937":
        _, words, position, has_gauss, gauss = state
        # numpy takes any number for the position, and would read behind the words from there.
        if np.shape(words) != (_WORDS,) or not 0 <= int(position) <= _WORDS:
            raise ValueError(f"{np.shape(words)} words, at {position}")
        check_finite(gauss, "its last part")
        state = ("MT19937", words, int(position), int(has_gauss), float(gauss))
    np.random.RandomState().set_state(state)
    return lambda: np.random.set_state(state)
