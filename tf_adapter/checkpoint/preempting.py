"""zero.preemption and zero.callbacks.Preemption: training that leaves in time and goes on later."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from zerohvd.communication.collectives import Collectives
from zerohvd.keras import compat
from zerohvd.keras.checkpoint.api import CheckpointManager
from zerohvd.keras.optimizer.distributed import DistributedOptimizer, ranks_of, unwrap
from zerohvd.preemption.departure import EXIT_CODE, ByAllreduce, Departure, Terms, Wish
from zerohvd.preemption.job import Job, State


def preemption(
    folder: str | os.PathLike[str],
    model: Any,
    opt: Any = None,
    *,
    state: State | None = None,
    every: int | None = None,
    keep: int | None = 3,
    requeue: bool = True,
    walltime: float | None = None,
    signals: Iterable[str | int] | None = None,
    exit_code: int = EXIT_CODE,
) -> Job:
    """Save and leave when the job is asked to, or when its time ends; go on when it starts again.

        with zero.preemption("checkpoints", model, opt, state={"epoch": 0}) as job:
            for step in range(job.start_step, steps):
                train_step(...)
                job.step_done(step)

    For loops of your own; `fit` takes `zero.callbacks.Preemption`. A signal to any rank sets a
    flag. After the next step that begins all ranks save that step, rank 0 requeues the job (Slurm,
    array tasks too), and `step_done` raises SystemExit. The same happens before the scheduler's
    time for the job ends, early enough for twice what a save takes. When the script starts again,
    entering the block loads the last checkpoint.

    Args:
        folder: Of the checkpoints; none but those of this job.
        model, opt: As for `zero.save`; the model is built.
        state: A dict of what else to store, such as numbers and lists; filled when the job goes on.
            That of rank 0 is stored.
        every: Save every so many steps as well.
        keep: The newest so many checkpoints stay; None: all.
        requeue: Have Slurm start the job again.
        walltime: Seconds that the job may run from now on, where no scheduler says so.
        signals: That ask it to leave; USR1 and TERM (under LSF USR2, too) unless given.
        exit_code: Of all ranks when they leave: PBS's job script and LSF start the job again by it.
    """

    def optimizer() -> DistributedOptimizer | None:
        return unwrap(opt if opt is not None else getattr(model, "optimizer", None))

    def ranks() -> Collectives:
        found = optimizer()
        made = found is not None and found.step is not None
        return found.step.wire.eager if made and found is not None else ranks_of(model)

    terms = Terms(requeue=requeue, walltime=walltime, signals=signals, exit_code=exit_code)
    return Job(
        CheckpointManager(folder, keep, every),
        Departure(ranks, WithSteps(optimizer, ranks), terms),
        ranks,
        model=model,
        opt=opt,
        state=state,
        options={},
    )


class WithSteps:
    """Implements `Messenger`: every step adds up which gradients there are, and wishes too."""

    def __init__(
        self,
        optimizer: Callable[[], DistributedOptimizer | None],
        ranks: Callable[[], Collectives],
    ) -> None:
        self._optimizer = optimizer
        self._alone = ByAllreduce(ranks)
        self._wish: Callable[[], int] = lambda: 0
        self._told = 0

    def begin(self, wish: Callable[[], int]) -> None:
        self._wish = wish
        self._alone.begin(wish)

    def end(self) -> None:
        self._tell(0)
        self._alone.end()

    def after_step(self) -> int:
        wire = self._wire()
        if wire is None:
            return self._alone.after_step()
        if wire.size == 1:
            return self._wish()
        heard = int(wire.heard.numpy())
        if heard:
            wire.heard.assign(0.0)
        self._tell(self._wish())
        return heard

    def forget(self) -> None:
        wire = self._wire()
        if wire is not None:
            wire.heard.assign(0.0)
            self._tell(0)

    def _wire(self) -> Any:
        optimizer = self._optimizer()
        return None if optimizer is None or optimizer.step is None else optimizer.step.wire

    def _tell(self, wish: int) -> None:
        """To the other ranks, in the next step."""
        wire = self._wire()
        if wire is not None and wish != self._told:
            wire.wish.assign(float(wish))
            self._told = wish


class Preemption(keras.callbacks.Callback):
    """Let `fit` save and leave when the job is asked to, or its time ends, and go on later.

        model.fit(data, epochs=10, callbacks=[zero.callbacks.Preemption("checkpoints"), ...])

    A signal to any rank sets a flag. After the next step all ranks save, rank 0 requeues the job
    (Slurm, array tasks too), and `fit` raises SystemExit. The same happens before the scheduler's
    time for the job ends, early enough for twice what a save takes. When the script starts again,
    `fit` goes on in the same epoch after the same batch: batches that have been trained on are read
    and skipped, so give the data the same order in every start. Metrics of the epoch and the
    history go on too.

    Put it first. A `Checkpoint` beside it has a folder of its own and resume=False.

    Args:
        folder: Of the checkpoints; none but those of this job.
        every: Save every so many steps as well.
        keep: The newest so many checkpoints stay; None: all.
        requeue: Have Slurm start the job again.
        walltime: Seconds that the job may run from now on, where no scheduler says so.
        signals: That ask it to leave; USR1 and TERM (under LSF USR2, too) unless given.
        exit_code: Of all ranks when they leave: PBS's job script and LSF start the job again by it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = 3,
        requeue: bool = True,
        walltime: float | None = None,
        signals: Iterable[str | int] | None = None,
        exit_code: int = EXIT_CODE,
    ) -> None:
        super().__init__()
        terms = Terms(requeue=requeue, walltime=walltime, signals=signals, exit_code=exit_code)
        self.manager = CheckpointManager(folder, keep, every)
        self._departure = Departure(
            self._ranks, WithSteps(lambda: unwrap(self.model.optimizer), self._ranks), terms
        )
        self._between_epochs = ByAllreduce(self._ranks)
        self._resumes = True
        self._epoch = self._first_epoch = self._saved = 0
        self._stored: dict[str, Any] | None = None
        self._skipped: _Skipped | None = None

    def _ranks(self) -> Collectives:
        return ranks_of(self.model)

    # -- going on ----------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._departure.begin()
        self._between_epochs.begin(self._departure.wish)
        if self._resumes:
            self._resumes = False  # a second fit() continues with the model as it is
            self._stored = self.manager.restore(self.model)
        stored = self._stored
        if stored is not None:
            self._first_epoch = stored["epoch"]
            compat.set_initial_epoch(self.model, self._first_epoch)
            own = self._own_part(stored)
            self.model.history.history.update(own["history"])
            self._skipped = _Skipped(self.model, stored["batches"], own["logs"])
        self._saved = self._step()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if self._stored is None and epoch > self._first_epoch:
            # Validation may have taken long, without a step that could tell the other ranks.
            self._act(self._between_epochs.after_step(), 0, {})

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._skipped is not None and self._skipped.before(batch):
            self._skipped = None
        if self._stored is not None and self._skipped is None:
            self._check_not_loaded_again()
            self._put_metrics(self._own_part(self._stored)["metrics"])
            self._stored = None

    def _own_part(self, stored: dict[str, Any]) -> dict[str, Any]:
        """What this rank had; with another number of ranks, the first one's history."""
        ranks, parts = self._ranks(), stored["ranks"]
        if len(parts) == ranks.size:
            return dict(parts[ranks.rank])
        return {**parts[0], "metrics": []}

    def _check_not_loaded_again(self) -> None:
        if self._step() != self._saved:
            raise ValueError(
                f"zero.callbacks.Preemption has loaded step {self._saved}, and another callback "
                f"step {self._step()}: give that one resume=False, or leave it out"
            )

    def _put_metrics(self, values: list[Any]) -> None:
        variables = self.model.metrics_variables
        # Of another number of ranks, or of other metrics: those of this epoch begin here.
        if len(values) == len(variables):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(np.asarray(value, variable.dtype))

    # -- leaving -----------------------------------------------------------------------------------

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._skipped is None:
            self._act(self._departure.after_step(), batch + 1, logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        compat.set_initial_epoch(self.model, None)
        self._departure.end()
        self.manager.close()

    def _act(self, wish: int, batches: int, logs: dict[str, Any]) -> None:
        every = self.manager.every
        # Several steps may lie between two calls (steps_per_execution).
        due = every is not None and self._step() // every > self._saved // every
        if wish == Wish.NONE and not due:
            return
        self._save(batches, logs)
        if wish >= Wish.LEAVE:
            self._departure.leave(f"Saved step {self._saved} in {self.manager.directory}")

    def _save(self, batches: int, logs: dict[str, Any]) -> None:
        began = time.monotonic()
        self._saved = self._step()
        own = {
            "logs": {name: _plain(value) for name, value in logs.items()},
            "history": {k: [_plain(x) for x in v] for k, v in self.model.history.history.items()},
            "metrics": [_plain(v) for v in self.model.metrics_variables],
        }
        extra = {
            "epoch": self._epoch,
            "batches": batches,
            "ranks": self._ranks().allgather_object(own, name="zero/preemption/metrics"),
        }
        self.manager.save(self._saved, self.model, extra=extra)
        self._departure.measured(time.monotonic() - began)

    def _step(self) -> int:
        return int(np.asarray(self.model.optimizer.iterations))


def _plain(value: Any) -> Any:
    """A number or array as JSON can say it."""
    return np.asarray(value).tolist()


class _Skipped:
    """The batches of an epoch that have been trained on: `fit` reads them, and does no step.

    Args:
        model: The model that `fit` trains.
        count: How many there are.
        logs: What callbacks are told of them.
    """

    def __init__(self, model: Any, count: int, logs: dict[str, Any]) -> None:
        self._model, self._count, self._logs = model, count, logs
        self._built = False
        self._original = model.train_function
        model.train_function = self._read

    def before(self, batch: int) -> bool:
        """Whether all of them lie before this one; `fit` then makes steps again."""
        if batch < self._count:
            return False
        self._model.train_function = self._original
        return True

    def _read(self, iterator: Any) -> dict[str, Any]:
        for _ in range(self._model.steps_per_execution):
            batch = next(iterator)
        if not self._built:
            self._built = True
            # A step of the user's own may take batches that Keras does not understand: metrics of
            # this epoch then begin with the next step.
            with contextlib.suppress(Exception):
                compat.build_metrics(self._model, batch)
        return self._logs
