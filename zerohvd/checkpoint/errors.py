"""What can be wrong with a checkpoint, and how all ranks come to say the same."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from zerohvd.communication.collectives import Collectives
from zerohvd.errors import WaitTimeoutError, ZeroError

T = TypeVar("T")
_FRAME = 2048  # bytes


class CheckpointError(ZeroError):
    """A checkpoint cannot be written or read. Raised on every rank."""


class CorruptCheckpointError(CheckpointError):
    """Bytes of a checkpoint are missing, changed or from elsewhere."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint holds something else than the model, the optimizer or their helpers need."""


class ReplacedCheckpointError(CheckpointMismatchError):
    """Another checkpoint has come to its place while it was being read."""


# An error travels between ranks as its name and text, and arrives as one of these.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        CorruptCheckpointError,
        CheckpointMismatchError,
        ReplacedCheckpointError,
        ValueError,
        TypeError,
        RuntimeError,
    )
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
    except WaitTimeoutError:
        raise  # the others are not there: telling them would take as long again
    except Exception as error:
        caught = error
        mine["error"] = describe(error)
    everyone = _exchange(collectives, mine, f"zero/checkpoint/{name}")
    for rank, said in enumerate(everyone):
        if "error" in said:
            kind, text = said["error"]
            raise _KINDS[kind](text if collectives.size == 1 else f"rank {rank}: {text}") from (
                caught if rank == collectives.rank else None
            )
    return result, [said["value"] for said in everyone]  # type: ignore[return-value]


def _exchange(collectives: Collectives, value: Any, name: str) -> list[Any]:
    """`allgather_object`, in one collective instead of two where all values are short."""
    data = json.dumps(value).encode()
    frame = np.zeros(_FRAME, np.uint8)
    head = struct.pack("<Q", len(data)) + data[: _FRAME - 8]
    frame[: len(head)] = np.frombuffer(head, np.uint8)
    gathered = collectives.allgather(collectives.from_numpy(frame), name=name)
    frames = collectives.to_numpy(gathered).reshape(collectives.size, _FRAME)
    lengths = [struct.unpack("<Q", f[:8].tobytes())[0] for f in frames]
    # Every rank sees the same lengths, so all of them take the same branch.
    if max(lengths) > _FRAME - 8:
        return collectives.allgather_object(value, name=f"{name}/long")
    return [json.loads(f[8 : 8 + n].tobytes()) for f, n in zip(frames, lengths, strict=True)]


def describe(error: Exception) -> tuple[str, str]:
    """An error as it travels: the name of its kind, and what it says."""
    if isinstance(error, OSError):
        file = error.filename or "a file of the checkpoint"
        return "CheckpointError", f"{file}: {error.strerror or error}"
    for kind in type(error).__mro__:
        if kind.__name__ in _KINDS:
            return kind.__name__, str(error)
    return "CheckpointError", f"{type(error).__name__}: {error}"


def cannot(doing: str, path: Path, error: OSError | ValueError) -> CheckpointError:
    """`error` with the file it is about, which the system call may have left out."""
    reason = getattr(error, "strerror", None) or error
    return CheckpointError(f"cannot {doing} {path}: {reason}")


@contextlib.contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """Whatever goes wrong with what a checkpoint says is an error that names the checkpoint.

    Fields are checked one by one where they are used, with better words. This is for what comes
    out of frameworks and of the user's objects when they are given nonsense.
    """
    where = f"{path}, {what}" if what else f"{path}"
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{where}: {error}") from error
    except BrokenPipeError:
        raise  # of whoever reads what is printed about the checkpoint
    except OSError as error:
        raise cannot("read", path, error) from error
    except Exception as error:
        plain = type(error) in (ValueError, RuntimeError)
        said = str(error) if plain else f"{type(error).__name__}: {error}"
        raise CheckpointMismatchError(f"{where}: {said}") from error


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
