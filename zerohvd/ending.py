"""The end of a process whose wait has failed, or cannot, comes in bounded time."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time


class _End:
    """Of this process."""

    def __init__(self) -> None:
        self.is_bounded = False
        self._come = threading.Event()
        self._is_watched = False

    def watch(self, seconds: float) -> None:
        if self._is_watched:
            return
        self._is_watched = True
        # Made now: the interpreter starts no threads when it ends.
        threading.Thread(target=_end_after, args=(self._come, seconds), daemon=True).start()
        atexit.register(self._begin)

    def _begin(self) -> None:
        if self.is_bounded:
            self._come.set()


_end = _End()


def bound_the_end(seconds: float) -> None:
    """Give the end of this process so many seconds, from when its script is done.

    Horovod and MPI say goodbye to the other ranks then. One that is frozen, or behind a cut link,
    does not answer: the process would stay, and a launcher ends a job only once a rank has ended.
    """
    _end.is_bounded = True
    _end.watch(seconds)


def free_the_end() -> None:
    """All ranks have met again: they will say goodbye."""
    _end.is_bounded = False


def _end_after(ending: threading.Event, seconds: float) -> None:
    ending.wait()
    time.sleep(seconds)
    leave(f"the other ranks have not let this one end within {seconds:.0f} s")


def leave(reason: str) -> None:
    """End this process now, whatever its main thread waits for."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        print(f"zerohvd: {reason}. It leaves", file=sys.stderr, flush=True)
    os._exit(1)
