"""One limit for all waits: how long a rank waits for others, what it says if they do not come.

`ZEROHVD_TIMEOUT` is that limit in seconds. Waits of ours that poll end by themselves. Collectives
that block inside a framework's kernels are ended by Horovod, which is told the same limit.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar

from zerohvd.ending import bound_the_end
from zerohvd.errors import WaitTimeoutError

VARIABLE = "ZEROHVD_TIMEOUT"
OLD_VARIABLE = "ZEROHVD_GATHER_TIMEOUT"
DEFAULT = 300.0

# Collectives of a small model take less than this: spin, as Horovod's own wait does. A sleep, of
# 0.1 ms at best, would be much of such a wait, and is nothing of a longer one.
_SPIN_SECONDS = 5e-3
_POLL_SECONDS = 1e-4
_POLL_SLOWLY_SECONDS = 1e-3
_SLOWLY_AFTER = 0.25
# What one look at the clock adds to a wait at most: time in which this process was stopped, as by a
# scheduler that suspends jobs, is nobody's delay.
_LONGEST_TICK = 1.0

# For the end of a process whose wait has failed: other ranks may still have to come to theirs.
_END_SECONDS = 30.0

_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))
_during: ContextVar[str] = ContextVar("during", default="")


def seconds(environ: Mapping[str, str] = os.environ) -> float:
    """How long a rank waits for others."""
    for name in (VARIABLE, OLD_VARIABLE):
        text = environ.get(name, "").strip()
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.0 < value < math.inf:
            raise ValueError(
                f"{name} must be a number of seconds greater than 0, such as 1800, got {text!r}"
            )
        return value
    return DEFAULT


@contextlib.contextmanager
def during(call: str) -> Iterator[None]:
    """Inside, errors about waits say that they happened in this call of the user's."""
    token = _during.set(_during.get() or call)
    try:
        yield
    finally:
        _during.reset(token)


def warning_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """How long a rank waits before it says for whom: as long as Horovod's own warning takes."""
    text = environ.get(_CHECK, "")
    value = float(text) if text.isdecimal() else min(_HOROVODS_CHECK, seconds(environ) / 5)
    return value or math.inf  # 0: the user wants no warnings


# -- waiting --------------------------------------------------------------------------------------


class Deadline:
    """The end of a wait that looks at it again and again.

    Attributes:
        waited: Seconds so far.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = seconds() if limit is None else limit
        self.waited = 0.0
        self._last = time.monotonic()
        self._warn_at: float | None = None

    def stalled(self) -> bool:
        """Whether to warn of this wait now: True once, after `warning_seconds()`."""
        if self.waited <= _SLOWLY_AFTER:
            return False
        if self._warn_at is None:
            self._warn_at = warning_seconds()
        if self.waited < self._warn_at:
            return False
        self._warn_at = math.inf
        return True

    def passed(self) -> bool:
        now = time.monotonic()
        self.waited += min(now - self._last, _LONGEST_TICK)
        self._last = now
        return self.waited > self.limit


def wait(
    done: Callable[[], bool],
    late: Callable[[float], Exception],
    stalled: Callable[[float], None] | None = None,
) -> float:
    """Return the seconds until `done()`; after `seconds()` of them, raise `late(waited)`.

    Args:
        stalled: Called once, some time before that, if the wait is long: see `warning_seconds`.
    """
    if done():
        return 0.0
    deadline = Deadline()
    while not done():
        if deadline.passed():
            raise late(deadline.waited)
        if stalled is not None and deadline.stalled():
            stalled(deadline.waited)
        if deadline.waited < _SPIN_SECONDS:
            _give_way()
        else:
            slowly = deadline.waited > _SLOWLY_AFTER
            time.sleep(_POLL_SLOWLY_SECONDS if slowly else _POLL_SECONDS)
    return deadline.waited


# -- what is said ---------------------------------------------------------------------------------

# Parts of a collective's name, in the order in which they are looked for, in the user's words.
_WORDS = (
    (r"/(reducescatter|allreduce|sparse)/", "the gradients of {}"),
    (r"/allgather/", "the values of {}"),
    (r"/init\b", "the initial values of rank 0"),
    (r"/agree/(digest|reference|difference|instance|tables|present)", "the start of training"),
    (r"/agree$", "the beginning of the call"),
    (r"/checkpoint/", "their part in a checkpoint"),
    (r"/saved/", "the rank that saves a file"),
    (r"/dataset", "zero.shard_dataset()"),
    (r"/fit", "model.fit()"),
    (r"/monitor", "the metric that decides what is saved"),
    (r"/preemption", "the agreement on whether to leave"),
    (r"/norm$", "the norm of the gradients"),
    (r"/overflow$", "a look for overflows in the gradients"),
    (r"/weights?$", "the weights of the ranks' batches"),
    (r"/written\b", "what zero.gathered(writable=True) has changed"),
    (r"/watched$", "the numbers of zero.Monitor"),
)


def in_words(name: str) -> str:
    """What a collective of this name is for; what is no name stays as it is."""
    if not name or " " in name.partition("/")[0]:
        return name
    # TensorFlow allows no slashes in names.
    slashed = name if "/" in name else name.replace(".", "/")
    for pattern, words in _WORDS:
        found = re.search(pattern, slashed)
        if found is not None:
            first = name[found.end() :]
            return f"{words.format(f'{first!r} and its bucket')} (collective {name!r})"
    return f"collective {name!r}"


def warn_of(handle: object, waited: float) -> None:
    """Warn of a wait that is long, if the handle can say more than that."""
    warn = getattr(handle, "warn", None)
    if warn is not None:
        warn(waited)


def say_stalled(
    rank: int, members: Sequence[int], what: str, waited: float, missing: str = ""
) -> None:
    """Print one line about a wait that goes on.

    Args:
        what: What `rank` waits for, in the user's words.
        missing: A sentence about the ranks that have not come.
    """
    ends = f"It waits until {seconds():.0f} s ({VARIABLE})"
    known = missing or ("" if len(members) == 2 else f"{NAMED}.")
    line = f"zerohvd: {_waits(rank, members, what, waited)}. {known} {ends}\n"
    # One write: launchers mix the lines of ranks that write in parts.
    sys.stderr.write(line)
    sys.stderr.flush()


def timed_out(
    rank: int, members: Sequence[int], what: str, waited: float, missing: str = ""
) -> WaitTimeoutError:
    """The error of `rank`, which has waited for the other `members`.

    Args:
        what: What it has waited for, in the user's words.
        waited: Seconds.
        missing: A sentence about the ranks that have not come.
    """
    who = _others(rank, members)
    known = f"{missing} " if missing else "" if len(members) == 2 else f"{NAMED}. "
    bound_the_end(_END_SECONDS)
    return WaitTimeoutError(
        f"{_waits(rank, members, what, waited)}. {known}See the output "
        f"of {who}, which may have failed, or made another call. {_ADVICE}"
    )


def _waits(rank: int, members: Sequence[int], what: str, waited: float) -> str:
    who = _others(rank, members)
    return f"rank {rank} has waited {waited:.0f} s for {who}{_where()}: {what}"


def explain(
    error: Exception, rank: int, members: Sequence[int], what: str, waited: float | None = None
) -> WaitTimeoutError | None:
    """What an error of Horovod's means for `rank`; None if it is about something else.

    Args:
        what: The collective that has failed, in the user's words.
        waited: Seconds, if somebody has counted them.
    """
    how = "waits" if waited is None else f"has waited {waited:.0f} s"
    vain = f"rank {rank} {how} in vain{_where()}: {what}"
    if _IN_FLIGHT in str(error):
        bound_the_end(_END_SECONDS)
        return WaitTimeoutError(
            f"{vain}. It still waits in the same collective from an earlier call that has failed: "
            "ranks that did not come then cannot be met now. End the job, and start it again from "
            "a checkpoint"
        )
    if not is_shut_down(error):
        return None
    who = _others(rank, members)
    limit = os.environ.get(_SHUTDOWN, "0")
    late = f", or did not come within {limit} s. {NAMED}" if limit.strip("0") else ""
    return WaitTimeoutError(
        f"{vain}. Horovod was shut down, because {who} ended{late}. See the output of {who}. "
        f"{_ADVICE}"
    )


def _where() -> str:
    return f" in {_during.get()}" if _during.get() else ""


def _others(rank: int, members: Sequence[int]) -> str:
    others = [f"rank {m}" for m in members if m != rank]
    return others[0] if len(others) == 1 else "other ranks"


NAMED = "Those missing are named by Horovod in the output of rank 0 ('Missing ranks:')"
_ADVICE = (
    "All ranks have to make the same calls equally often: backward passes and step(), model.fit(), "
    "state_dict(), zero.save(), zero.load(). If a rank is only slow, as in a long evaluation, set "
    f"{VARIABLE} to more seconds"
)
_IN_FLIGHT = "with the same name as another tensor that is currently being processed"
_SHUT_DOWN = "Horovod has been shut down"


def is_shut_down(error: BaseException) -> bool:
    """Whether Horovod failed because it has been shut down, by the end of a rank or a limit.

    Elastic jobs recognise Horovod's own error, shut down and start again: nothing to explain there.
    """
    return _SHUT_DOWN in str(error) and not is_elastic()


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranks may come and go."""
    return environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


# -- Horovod --------------------------------------------------------------------------------------

_CHECK = "HOROVOD_STALL_CHECK_TIME_SECONDS"
_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_HOROVODS_CHECK = 60


TOO_LATE = (
    "Horovod was initialised before {} was imported, and waits without a limit for ranks that have "
    f"failed: import it before hvd.init(), or set {_SHUTDOWN} for the whole job"
)


def name_missing_ranks(environ: MutableMapping[str, str]) -> None:
    """Let Horovod, when it is initialised, warn of missing ranks some time before the limit."""
    limit = math.ceil(seconds(environ))
    environ.setdefault(_CHECK, str(max(1, min(_HOROVODS_CHECK, limit // 5))))


def end_stalled_collectives(environ: MutableMapping[str, str]) -> bool:
    """Let Horovod, when it is initialised, end collectives to which not all ranks come.

    For collectives that block in kernels, where nobody else could. It looks every
    HOROVOD_STALL_CHECK_TIME_SECONDS, and up to three times until it sees a collective that it
    keeps in its cache: it may take that much longer than the limit. A user's own settings stay.

    Returns:
        Whether the limit was set here.
    """
    name_missing_ranks(environ)
    if _SHUTDOWN in environ:
        return False
    # Horovod reads whole numbers, and ignores a limit below the time between two looks.
    check = int(environ[_CHECK]) if environ[_CHECK].isdecimal() else _HOROVODS_CHECK
    environ[_SHUTDOWN] = str(max(math.ceil(seconds(environ)), check))
    return True
