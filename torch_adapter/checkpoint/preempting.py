"""zero.preemption: a training loop that leaves in time and goes on later."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerohvd.communication.rendezvous import Rendezvous
from zerohvd.preemption.departure import EXIT_CODE, ByAllreduce, Departure, Messenger, Terms
from zerohvd.preemption.job import Job, State
from zerohvd.torch import compat
from zerohvd.torch.checkpoint.api import CheckpointManager
from zerohvd.torch.checkpoint.holdings import optimizer_of
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives, join
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer


def preemption(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    opt: ZeroOptimizer | None = None,
    *,
    state: State | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    every: int | None = None,
    keep: int | None = 3,
    requeue: bool = True,
    walltime: float | None = None,
    signals: Iterable[str | int] | None = None,
    exit_code: int = EXIT_CODE,
) -> Job:
    """Save and leave when the job is asked to, or when its time ends; go on when it starts again.

        with zero.preemption("checkpoints", model, opt, state={"sampler": sampler}) as job:
            for step in range(job.start_step, steps):
                ...
                opt.step()
                job.step_done(step)

    A signal to any rank sets a flag. After the next step that begins all ranks save that step, rank
    0 requeues the job (Slurm, array tasks too), and `step_done` raises SystemExit. The same happens
    before the scheduler's time for the job ends, early enough for twice what a save takes. When
    the script starts again, entering the block loads the last checkpoint.

    Args:
        folder: Of the checkpoints; none but those of this job.
        model, opt, scheduler, scaler: As for `zero.save`.
        state: A dict of what else to store, such as numbers, lists and objects with a state_dict();
            filled when the job goes on. That of rank 0 is stored.
        every: Save every so many steps as well.
        keep: The newest so many checkpoints stay; None: all.
        requeue: Have Slurm start the job again.
        walltime: Seconds that the job may run from now on, where no scheduler says so.
        signals: That ask it to leave; USR1 and TERM (under LSF USR2, too) unless given.
        exit_code: Of all ranks when they leave: PBS's job script and LSF start the job again by it.
    """
    holder = optimizer_of(model) if opt is None else opt

    def ranks() -> TorchCollectives | LocalCollectives:
        return join() if holder is None else holder.collectives

    terms = Terms(requeue=requeue, walltime=walltime, signals=signals, exit_code=exit_code)
    messenger: Messenger = ByAllreduce(ranks) if holder is None else WithSteps(holder.rendezvous)
    compat.keep_handlers_of_workers()
    return Job(
        CheckpointManager(folder, keep, every),
        Departure(ranks, messenger, terms),
        ranks,
        model=model,
        opt=opt,
        state=state,
        options={"scheduler": scheduler, "scaler": scaler},
    )


class WithSteps:
    """Implements `Messenger`: every step begins with a rendezvous, in which wishes travel."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._before = rendezvous.wish

    def begin(self, wish: Callable[[], int]) -> None:
        self._rendezvous.take_heard()
        self._rendezvous.wish = wish

    def end(self) -> None:
        self._rendezvous.wish = self._before

    def after_step(self) -> int:
        return self._rendezvous.take_heard()

    def forget(self) -> None:
        self._rendezvous.take_heard()
