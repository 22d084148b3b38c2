"""What the scheduler of this job says: how long it may still run, and how it comes back.

Slurm is asked and told by its commands. PBS and LSF are asked; they bring a job back by its exit
code (`bsub -Q 85`, or a line in the job script).
"""

from __future__ import annotations

import abc
import math
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

# A command that takes longer than so many seconds has said nothing.
_PATIENCE = 10.0
_STARTED = time.monotonic()

Tell = Callable[[Sequence[str]], str]


class SchedulerError(RuntimeError):
    """A command of the scheduler failed; says what it said."""


def tell(argv: Sequence[str]) -> str:
    """What a command prints."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except FileNotFoundError:
        raise SchedulerError(f"there is no {argv[0]} on PATH") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SchedulerError(str(error)) from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SchedulerError(f"{' '.join(argv)}: {said[-1] if said else done.returncode}")
    return done.stdout


class Scheduler(abc.ABC):
    """The scheduler that runs this job.

    Args:
        job: As its commands want to have it.
        tell: Runs a command.
    """

    def __init__(self, job: str, tell: Tell = tell) -> None:
        self.job, self._tell = job, tell

    @abc.abstractmethod
    def seconds_left(self) -> float | None:
        """How long the job may still run; None: nobody has set an end.

        Raises:
            SchedulerError: It does not say.
        """

    @abc.abstractmethod
    def requeue(self, *, in_time: bool) -> str:
        """Have the job started again; returns what was done, for the user.

        Args:
            in_time: The job's time is not over.

        Raises:
            SchedulerError: It will not be started again.
        """


def scheduler_of(environ: Mapping[str, str], tell: Tell = tell) -> Scheduler | None:
    """The scheduler of the job that `environ` speaks of; None outside of a job."""
    if "SLURM_JOB_ID" in environ:
        job = environ["SLURM_JOB_ID"]
        if "SLURM_ARRAY_TASK_ID" in environ:
            # One task has the number of the whole array, and would stand for all of them.
            job = f"{environ.get('SLURM_ARRAY_JOB_ID', job)}_{environ['SLURM_ARRAY_TASK_ID']}"
        return Slurm(job, environ.get("SLURM_JOB_END_TIME", ""), tell)
    if "PBS_JOBID" in environ:
        return PBS(environ["PBS_JOBID"], environ.get("PBS_WALLTIME", ""), tell)
    if "LSB_JOBID" in environ:
        job, index = environ["LSB_JOBID"], environ.get("LSB_JOBINDEX", "0")
        return LSF(job if index in ("", "0") else f"{job}[{index}]", tell)
    return None


class Slurm(Scheduler):
    """Slurm; `end` is its SLURM_JOB_END_TIME, if it sets that."""

    def __init__(self, job: str, end: str = "", tell: Tell = tell) -> None:
        super().__init__(job, tell)
        self._end = end

    def seconds_left(self) -> float | None:
        # Asked first: an administrator may have given the job more time since it started.
        try:
            said = self._tell(["squeue", "--noheader", "--jobs", self.job, "--format=%L"])
        except SchedulerError:
            if not self._end.isdecimal():
                raise
            return float(self._end) - time.time()
        left = said.strip()
        return None if left in ("UNLIMITED", "NOT_SET") else duration(left)

    def requeue(self, *, in_time: bool) -> str:
        state = self._tell(["squeue", "--noheader", "--jobs", self.job, "--format=%T"]).strip()
        if in_time and state not in ("RUNNING", "SUSPENDED", "STOPPED", "PREEMPTED"):
            # After scancel: who cancels a job does not want to have it back.
            raise SchedulerError(f"Slurm says that it is {state or 'gone'}: cancelled, it seems")
        self._tell(["scontrol", "requeue", self.job])
        return f"Slurm job {self.job} is requeued"


class PBS(Scheduler):
    """PBS Pro, OpenPBS, Torque; `walltime` is Torque's PBS_WALLTIME."""

    def __init__(self, job: str, walltime: str = "", tell: Tell = tell) -> None:
        super().__init__(job, tell)
        self._walltime = walltime

    def seconds_left(self) -> float | None:
        try:
            said = self._tell(["qstat", "-f", self.job])
        except SchedulerError:
            if not self._walltime:
                raise
            return duration(self._walltime) - (time.monotonic() - _STARTED)
        limit = re.search(r"Resource_List\.walltime = (\S+)", said)
        return None if limit is None else duration(limit[1]) - _used(said)

    def requeue(self, *, in_time: bool) -> str:
        return "the job script submits the job again if it sees this exit code"


def _used(said: str) -> float:
    """Seconds that a job of PBS has run, by what `qstat -f` says."""
    used = re.search(r"resources_used\.walltime = (\S+)", said)
    began = re.search(r"\b(?:stime|start_time) = (\w+ \w+ +\d+ [\d:]+ \d+)", said)
    known = [time.monotonic() - _STARTED]
    # PBS notes what was used every few minutes only.
    known += [duration(used[1])] if used else []
    known += [time.time() - time.mktime(time.strptime(began[1]))] if began else []
    return max(known)


class LSF(Scheduler):
    """LSF."""

    def seconds_left(self) -> float | None:
        said = self._tell(["bjobs", "-noheader", "-o", "time_left", self.job]).strip()
        # "1:30 L": hours and minutes until the limit; E: an estimate, "-": there is no limit.
        found = re.fullmatch(r"(\d+):(\d+) L", said)
        if found is None:
            return None
        # The minute that has begun may be over in a second.
        return max(0.0, int(found[1]) * 3600.0 + (int(found[2]) - 1) * 60.0)

    def requeue(self, *, in_time: bool) -> str:
        return "LSF starts the job again if it was submitted with bsub -Q and this exit code"


def duration(text: str) -> float:
    """Seconds of "2-03:04:05", "03:04:05", "04:05" or "245"."""
    found = re.fullmatch(r"(?:(\d+)-)?((?:\d+:){0,2}\d+)", text.strip())
    if found is None:
        raise SchedulerError(f"{text!r} is not understood as a time")
    parts = [int(p) for p in found[2].split(":")]
    seconds = math.fsum(p * 60.0**i for i, p in enumerate(reversed(parts)))
    return seconds + 86400.0 * int(found[1] or 0)
