"""Leaving a world that has lost a rank, or is about to change: see `rejoin`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from zerohvd.elastic import rejoin

_LOST = ("Horovod has been shut down", "HorovodInternalError")


def start_again() -> NoReturn:
    """Become the script again, from its beginning, in the world that comes.

    Nothing of this process stays: its connections end, by which others hear of it, and so do its
    threads. Child processes, such as a DataLoader's, would take the new program for their parent.
    """
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Closed by the system in the moment of the change: Horovod's threads, still running, would
    # abort the process if they found their connections closed before.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)
    python = sys.executable
    os.execv(python, [python, str(rejoin.__file__), python, *sys.orig_argv[1:]])


def tells_of_a_loss(error: BaseException) -> bool:
    """Whether an error means that other ranks are gone, not that this one has made a mistake."""
    return any(
        mark in f"{type(each).__name__}: {each}" for each in _chain(error) for mark in _LOST
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


class Notices:
    """What the launcher tells one of the ranks: hosts have come, or are about to go."""

    def __init__(self) -> None:
        self.came = False

    def on_hosts_updated(self, timestamp: int, result: int) -> None:
        """As Horovod's notification manager calls its listeners, in a thread."""
        self.came = True
