"""Signals that ask a job to leave: they set a flag, and nothing else happens at that moment.

A scheduler signals every process of a job, so also those that load data. Without the handler of
their parent a USR1 would kill them, and the training with them; with it they would set a flag that
nobody reads. So in a forked child USR1 is ignored, and a TERM that its parent has got as well; a
TERM for the child alone, as of `process.terminate()`, ends it.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

# A child waits so many seconds to see whether its parent has got the same signal.
_PATIENCE = 0.3
_POLL = 0.01


class Listener:
    """Whether a signal has asked this process to leave."""

    def __init__(self) -> None:
        self._got: list[int] = []
        self._before: dict[int, Any] = {}
        self._forks_are_watched = False
        # Shared with forked children: whether this process has been asked to leave.
        self._told = mmap.mmap(-1, 1)

    @property
    def listens(self) -> bool:
        return bool(self._before)

    @property
    def asked(self) -> str:
        """The name of the signal that came first; empty if none has come."""
        return signal.Signals(self._got[0]).name if self._got else ""

    def start(self, numbers: Iterable[int]) -> None:
        """Set handlers for these signals, where they are not set already."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "signals can only be listened to in the main thread: call zero.preemption(...), or "
                "zerohvd.preemption.listen(), there"
            )
        for number in numbers:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._take)
                # Calls of MPI and of frameworks that are interrupted start again by themselves.
                signal.siginterrupt(number, False)
        if not self._forks_are_watched:
            self._forks_are_watched = True
            os.register_at_fork(after_in_child=self._in_child)

    def stop(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        self.forget()

    def forget(self) -> None:
        """Signals that have come are answered; from now on children end when they are told to."""
        self._got.clear()
        self._told[0] = 0

    def _take(self, number: int, _: Any) -> None:
        self._got.append(number)
        self._told[0] = 1

    def _in_child(self) -> None:
        numbers = list(self._before)
        self._before.clear()
        self._got.clear()
        _spare(numbers, self._told)


_listener = Listener()


def listen(signals: Iterable[str | int] | None = None) -> Listener:
    """Let USR1 and TERM set a flag from now on, which `zero.preemption` then looks at.

    For scripts that may be signalled before they come to `zero.preemption(...)`: USR1 would end
    them while they import.

    Args:
        signals: Others than USR1 and TERM (under LSF also USR2, its signal at the run limit), by
            name or number.
    """
    _listener.start(numbers_of(signals, os.environ))
    return _listener


def numbers_of(signals: Iterable[str | int] | None, environ: Mapping[str, str]) -> list[int]:
    """The numbers of signals; without any, of those that schedulers send."""
    if signals is None:
        signals = ("USR1", "TERM", "USR2") if "LSB_JOBID" in environ else ("USR1", "TERM")
    if isinstance(signals, (str, int)):
        signals = (signals,)
    return [_number(s) for s in signals]


def _number(given: str | int) -> int:
    try:
        if isinstance(given, int):
            number = signal.Signals(given)
        else:
            number = signal.Signals["SIG" + given.upper().removeprefix("SIG")]
    except (KeyError, ValueError):
        raise ValueError(f'signals must be such as "USR1", got {given!r}') from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{number.name} cannot be caught: ask the scheduler for USR1 or TERM")
    return number


# -- processes that load data ----------------------------------------------------------------------


def spare_worker(worker: int = 0) -> None:
    """Let signals to all processes of a job pass by this one, which loads data.

    Forked workers do so by themselves. Those that are started afresh take it as their first call:
    `DataLoader(..., multiprocessing_context="spawn", worker_init_fn=spare_worker)`. A TERM ends
    them, as they cannot see whether their parent has got one too.
    """
    _spare(numbers_of(None, os.environ), None)


def _spare(numbers: Iterable[int], told: mmap.mmap | None) -> None:
    parent = os.getppid()

    def end_unless_all_were_asked(number: int, _: Any) -> None:
        until = time.monotonic() + _PATIENCE
        while told is not None and os.getppid() == parent:
            if told[0]:
                return
            if time.monotonic() > until:
                break
            time.sleep(_POLL)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in numbers:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
        elif told is not None:
            signal.signal(number, end_unless_all_were_asked)


def say(text: str) -> None:
    """For the user, from one rank; at once, as the process is about to end."""
    print(f"zerohvd: {text}", file=sys.stderr, flush=True)
