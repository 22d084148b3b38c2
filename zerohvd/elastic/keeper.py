"""The keeper: one small process per host that gives memory back when nobody needs it any more.

    python -m zerohvd.elastic.keeper FOLDER SECONDS

Files on tmpfs outlive the ranks that wrote them. Ranks, and `zerohvd run` on its own host, hold a
shared lock in the folder. When nobody has held it for SECONDS, the job will not come back: the
keeper removes the folder. It is started by ranks, outlives them, and ends when the folder is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

KEEPER, USERS, DONE = "keeper.lock", "users.lock", "done.lock"
PATIENCE_VARIABLE = "ZEROHVD_ELASTIC_PATIENCE"
# A job that starts again does so within seconds; one whose hosts have to come first takes longer.
PATIENCE = 900.0
# Of a training that has come to its end. Its script may fail behind it, and start again.
_SHORT_PATIENCE = 60.0
_LOOK_SECONDS = 1.0
_TRIES = 5


def start(folder: Path) -> None:
    """Start a keeper for this host's folder, unless there is one; for one rank of a host."""
    free = _lock(folder / KEEPER, fcntl.LOCK_SH)
    if free is None:
        return
    os.close(free)
    patience = _patience(os.environ.get(PATIENCE_VARIABLE, ""))
    # A session of its own: launchers end those of their ranks. And none of their pipes, whose ends
    # they wait for.
    subprocess.Popen(
        [sys.executable, "-m", "zerohvd.elastic.keeper", str(folder), str(patience)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _patience(text: str) -> float:
    try:
        seconds = float(text or PATIENCE)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{PATIENCE_VARIABLE} must be a number of seconds, got {text!r}")
    return seconds


def keep(folder: Path, patience: float) -> None:
    """Run until the folder is gone, or has been without users for `patience` seconds."""
    for _ in range(_TRIES):  # who looks whether there is a keeper holds the lock for a moment
        own = _lock(folder / KEEPER, fcntl.LOCK_EX)
        if own is not None:
            break
        time.sleep(_LOOK_SECONDS)
    else:
        return
    unused = 0.0
    while folder.is_dir():
        unused = unused + _LOOK_SECONDS if _is_unused(folder) else 0.0
        if unused > (_SHORT_PATIENCE if (folder / DONE).exists() else patience):
            remove(folder)
        time.sleep(_LOOK_SECONDS)


def hurry(folder: Path, yes: bool = True) -> None:
    """Say that the training has come to its end, or that it goes on."""
    with contextlib.suppress(OSError):
        if yes and folder.is_dir():
            (folder / DONE).touch()
        else:
            (folder / DONE).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Give a host's memory back."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # unless another host's name is in there


def _is_unused(folder: Path) -> bool:
    lock = _lock(folder / USERS, fcntl.LOCK_EX)
    if lock is not None:
        os.close(lock)
    return lock is not None


def _lock(file: Path, how: int) -> int | None:
    """A descriptor that holds the lock; None: somebody else does, or the folder is gone."""
    with contextlib.suppress(OSError):
        # Never made here: somebody may be about to remove the folder.
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        return fd
    return None


if __name__ == "__main__":
    keep(Path(sys.argv[1]), float(sys.argv[2]))
