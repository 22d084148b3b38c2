"""Reductions in flight: a queue of limited length, waited for with limited patience."""

from __future__ import annotations

import abc
import contextlib
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

from zerohvd.communication.collectives import Handle

# Between two looks at a collective in flight: short against the time a bucket takes.
_POLL_SECONDS = 1e-4


class Pending(Protocol):
    """A bucket whose reduction has been started."""

    @property
    def bucket(self) -> int: ...

    @property
    def handle(self) -> Handle: ...


P = TypeVar("P", bound=Pending)


class InFlight(abc.ABC, Generic[P]):
    """Buckets in flight, completed in the order in which they were started.

    A base class, not a member with a callback: the cycle of references would keep gradients alive
    until the garbage collector runs.

    Attributes:
        pending: The buckets, the oldest first.
    """

    def __init__(self, most: int) -> None:
        """
        Args:
            most: How many buckets may be in flight when `has_room` lets another one go.
        """
        self.pending: deque[P] = deque()
        self._most = most

    @abc.abstractmethod
    def complete(self, pending: P) -> None:
        """Wait for the handle, and use what has come."""

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Entered while this rank waits for a bucket."""
        return contextlib.nullcontext()

    def reap(self) -> None:
        """Complete the buckets that have been reduced by now."""
        while self.pending and self.pending[0].handle.done():
            self.complete(self.pending.popleft())

    def has_room(self, b: int, patience: float) -> bool:
        """Return whether bucket `b` may go now; waits for earlier ones for `patience` seconds.

        Waiting without end inside a backward pass could be a deadlock: another rank may have left
        its own already, and wait for this one in a collective of the user's.
        """
        self.reap()
        deadline = time.monotonic() + patience
        while len(self.pending) >= self._most or self._holds(b):
            if not self._complete_oldest(deadline):
                return False
        return True

    def settle(self, patience: float) -> bool:
        """Wait for all in flight, for `patience` seconds; return whether nothing is left."""
        deadline = time.monotonic() + patience
        while self.pending:
            if not self._complete_oldest(deadline):
                return False
        return True

    def finish(self, b: int | None = None) -> None:
        """Wait until bucket `b` and those below it have been reduced, or all of them."""
        while self.pending and (b is None or any(p.bucket <= b for p in self.pending)):
            self.complete(self.pending.popleft())

    def finish_earlier(self, b: int) -> None:
        """Wait until bucket `b`, which may be in flight for an earlier pass, has been reduced."""
        while self._holds(b):
            self.complete(self.pending.popleft())

    def _holds(self, b: int) -> bool:
        return any(p.bucket == b for p in self.pending)

    def _complete_oldest(self, deadline: float) -> bool:
        handle = self.pending[0].handle
        if not handle.done():
            with self.waiting():
                while not handle.done():
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(_POLL_SECONDS)
        self.complete(self.pending.popleft())
        return True
