"""When the ranks of a job save and leave, and how: one decision for all of them.

Any rank may be asked to leave by a signal; rank 0 also knows when the job's time ends. What a rank
wishes travels with something that every step sends anyway: all ranks know it after the same step.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np

from zerohvd import launchers
from zerohvd.checkpoint import together
from zerohvd.communication.collectives import Collectives
from zerohvd.preemption import signals
from zerohvd.preemption.schedulers import Scheduler, SchedulerError, scheduler_of

EXIT_CODE = 85
# Seconds between the end of the last save and that of the job: to requeue, and to end processes.
_RESERVE = 10.0
_HOROVODRUN = (
    "horovodrun passes on TERM but not USR1, and kills all ranks 5 s later, whether or not they "
    "have saved. Saves that take longer need mpirun or srun; the end of the walltime is seen in "
    "time with horovodrun too"
)


class Wish(enum.IntEnum):
    """What a rank wishes to happen after the next step; the highest one counts."""

    NONE = 0
    SAVE = 1  # of rank 0 alone
    LEAVE = 2


class Messenger(Protocol):
    """Carries wishes with what each step sends anyway."""

    def begin(self, wish: Callable[[], int]) -> None:
        """From now on tell the other ranks what `wish` returns."""

    def end(self) -> None:
        """Tell them nothing any more."""

    def after_step(self) -> int:
        """What the ranks wished in the last step, the same on all of them; forgets it."""

    def forget(self) -> None:
        """Wishes up to now have come true: who still has one tells it again."""


class ByAllreduce:
    """A messenger where nothing else travels: one small allreduce per step."""

    def __init__(self, ranks: Callable[[], Collectives]) -> None:
        self._ranks = ranks
        self._wish: Callable[[], int] = lambda: 0

    def begin(self, wish: Callable[[], int]) -> None:
        self._wish = wish

    def end(self) -> None:
        self._wish = lambda: 0

    def after_step(self) -> int:
        ranks = self._ranks()
        mine = ranks.from_numpy(np.array([self._wish()], np.float32))
        heard = ranks.allreduce(mine, "max", name="zero/preemption")
        return int(ranks.to_numpy(heard)[0])

    def forget(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a job leaves.

    Args:
        requeue: Have the scheduler start the job again.
        walltime: Seconds that the job may run from now on; None: as the scheduler says.
        signals: Names or numbers; None: those that schedulers send.
        exit_code: Of all ranks.
    """

    requeue: bool = True
    walltime: float | None = None
    signals: Iterable[str | int] | None = None
    exit_code: int = EXIT_CODE

    def __post_init__(self) -> None:
        if self.walltime is not None and not self.walltime > 0:
            raise ValueError(f"walltime must be a number of seconds, got {self.walltime!r}")
        if not 1 <= self.exit_code <= 255:
            raise ValueError(f"exit_code must lie between 1 and 255, got {self.exit_code!r}")


class StepTimes:
    """How long steps take, with all that a loop does between two of them."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._longest = self._total = 0.0
        self._count = 0

    def note(self, now: float) -> None:
        """A step is complete."""
        if self._last is not None:
            taken = now - self._last
            self._longest, self._total = max(self._longest, taken), self._total + taken
            self._count += 1
        self._last = now

    def pause(self) -> None:
        """What happens until the next step is complete does not count."""
        self._last = None

    def two_at_most(self) -> float:
        """Seconds for two steps, one of which may hold a validation or the like."""
        return self._longest + (self._total / self._count if self._count else 0.0)


class Departure:
    """Decides after each step, the same on all ranks; used by loops and by Keras' `fit`.

    Attributes:
        save_seconds: What a save takes, the longest so far; None: there was none.
    """

    def __init__(
        self,
        ranks: Callable[[], Collectives],
        messenger: Messenger,
        terms: Terms,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """
        Args:
            ranks: Joins the ranks that train together.
            messenger: Carries their wishes.
            terms: How they leave.
            environ: Speaks of the scheduler's job and of the launcher.
        """
        self._ranks, self._messenger, self._terms = ranks, messenger, terms
        self._environ = environ
        self._listened_before = False
        self._listener = signals.listen(())
        self.save_seconds: float | None = None
        self._steps = StepTimes()
        self._scheduler: Scheduler | None = None
        self._end: float | None = None
        self._time_is_up = False
        self._requeued = False

    # -- the beginning and the end -----------------------------------------------------------------

    def begin(self) -> None:
        """Listen to signals; rank 0 asks the scheduler when the job ends."""
        self._listened_before = self._listener.listens
        self._listener.start(signals.numbers_of(self._terms.signals, self._environ))
        self._messenger.begin(self.wish)
        if self._ranks().rank != 0:
            return
        self._scheduler = scheduler_of(self._environ)
        if self._terms.walltime is not None:
            self._end = time.monotonic() + self._terms.walltime
        else:
            self._ask_scheduler()
        if launchers.detect(self._environ).name == "horovodrun":
            signals.say(_HOROVODRUN)

    def end(self) -> None:
        """Training is over: signals do again what they did before."""
        self._messenger.end()
        if not self._listened_before:
            self._listener.stop()

    # -- after each step ---------------------------------------------------------------------------

    @property
    def seconds_left(self) -> float | None:
        """Until the end of the job; known on rank 0. None: there is none, or nobody says."""
        return None if self._end is None else self._end - time.monotonic()

    def after_step(self) -> Wish:
        """What all ranks do now."""
        self._steps.note(time.monotonic())
        self._time_is_up = self._ends_soon()
        return Wish(min(self._messenger.after_step(), Wish.LEAVE))

    def measured(self, seconds: float) -> None:
        """A save took so long."""
        self.save_seconds = max(self.save_seconds or 0.0, seconds)
        self._steps.pause()
        self._messenger.forget()  # the save itself may have carried wishes

    def wish(self) -> int:
        """What this rank wishes now."""
        if self._listener.asked or self._time_is_up:
            return Wish.LEAVE
        # How long a save takes must be known before the end comes near.
        return Wish.SAVE if self._end is not None and self.save_seconds is None else Wish.NONE

    def _ends_soon(self) -> bool:
        """Whether there is time for a save and little more. The ranks hear of it a step later."""
        needed = 2 * (self.save_seconds or 0.0) + self._steps.two_at_most() + _RESERVE
        left = self.seconds_left
        if left is None or left > needed:
            return False
        if self._terms.walltime is None and not self._time_is_up:
            self._ask_scheduler()  # it may have got more time meanwhile
            left = self.seconds_left
        return left is not None and left <= needed

    def _ask_scheduler(self) -> None:
        if self._scheduler is None:
            return
        try:
            left = self._scheduler.seconds_left()
        except SchedulerError as error:
            if self._end is None:
                signals.say(
                    f"the end of this job is not known ({error}): signals alone make it leave. "
                    "zero.preemption(..., walltime=SECONDS) says it"
                )
            return
        self._end = None if left is None else time.monotonic() + left

    # -- leaving -----------------------------------------------------------------------------------

    def leave(self, saved: str) -> NoReturn:
        """All ranks have saved: requeue the job, and end all processes.

        Args:
            saved: What was saved, for the user.

        Raises:
            SystemExit: With the exit code that asks for another start.
        """
        ranks = self._ranks()
        why = self._listener.asked or ("the end of the job's time" if self._time_is_up else "")
        told = ranks.allgather_object(why, name="zero/preemption/why")
        # All ranks wait for rank 0: mpirun ends the others as soon as one exits with an error.
        _, done = together(
            ranks, "requeue", lambda: self._requeue() if ranks.rank == 0 else "nothing"
        )
        if ranks.rank == 0:
            by = ", ".join(f"{said} on rank {rank}" for rank, said in enumerate(told) if said)
            code = self._terms.exit_code
            signals.say(f"asked to leave ({by}). {saved}. Exit code {code}: {done[0]}")
        self._listener.forget()
        self._time_is_up = False
        self._messenger.forget()
        self._listened_before = True  # until the process has ended: further signals change nothing
        raise SystemExit(self._terms.exit_code)

    def _requeue(self) -> str:
        if not self._terms.requeue:
            return "start it again, and it goes on"
        if self._requeued:
            return "it was requeued before"
        if self._scheduler is None:
            return "no scheduler runs this job; start it again, and it goes on"
        left = self.seconds_left
        try:
            done = self._scheduler.requeue(in_time=left is None or left > 0)
        except SchedulerError as error:
            return f"the job is not requeued ({error}); start it again, and it goes on"
        self._requeued = True
        return done
