"""What can be wrong with a checkpoint, and how all ranks come to say the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from zerohvd.collectives import Collectives
from zerohvd.errors import ZeroError

T = TypeVar("T")


class CheckpointError(ZeroError):
    """A checkpoint cannot be written or read. Raised on every rank."""


class CorruptCheckpointError(CheckpointError):
    """Bytes of a checkpoint are missing, changed or from elsewhere."""


# An error travels between ranks as its name and text, and arrives as one of these.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointError, CorruptCheckpointError, ValueError, TypeError, RuntimeError)
}


def together(collectives: Collectives, name: str, act: Callable[[], T]) -> tuple[T, list[Any]]:
    """Run `act` on every rank, and go on only if it went well on all of them.

    Returns:
        What `act` returned here, and what it returned on every rank if JSON can say it, in rank
        order (None where it cannot).

    Raises:
        Exception: That of the lowest rank that failed, in the same words on every rank.
    """
    result: T | None = None
    mine: dict[str, Any] = {}
    caught: Exception | None = None
    try:
        result = act()
        mine["value"] = result if isinstance(result, (str, int, dict, list)) else None
    except Exception as error:
        caught = error
        mine["error"] = describe(error)
    everyone = collectives.allgather_object(mine, name=f"zero/checkpoint/{name}")
    for rank, said in enumerate(everyone):
        if "error" in said:
            kind, text = said["error"]
            raise _KINDS[kind](text if collectives.size == 1 else f"rank {rank}: {text}") from (
                caught if rank == collectives.rank else None
            )
    return result, [said["value"] for said in everyone]  # type: ignore[return-value]


def describe(error: Exception) -> tuple[str, str]:
    """An error as it travels: the name of its kind, and what it says."""
    if isinstance(error, OSError):
        file = error.filename or "a file of the checkpoint"
        return "CheckpointError", f"{file}: {error.strerror or error}"
    for kind in type(error).__mro__:
        if kind.__name__ in _KINDS:
            return kind.__name__, str(error)
    return "CheckpointError", f"{type(error).__name__}: {error}"


def cannot(doing: str, path: Path, error: OSError) -> CheckpointError:
    """`error` with the file it is about, which the system call may have left out."""
    return CheckpointError(f"cannot {doing} {path}: {error.strerror or error}")
