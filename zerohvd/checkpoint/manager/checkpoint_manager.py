"""zero.CheckpointManager, but for what a framework knows of a model."""

from __future__ import annotations

import abc
import os
from pathlib import Path
from typing import Any, TypeVar

from zerohvd.checkpoint import session
from zerohvd.checkpoint.errors import together
from zerohvd.checkpoint.format import absolute
from zerohvd.checkpoint.manager.folder import CheckpointFolder, Policy, check_metric
from zerohvd.communication.collectives import Collectives
from zerohvd.communication.rendezvous import Call

Self = TypeVar("Self", bound="CheckpointManager")


class CheckpointManager(abc.ABC):
    """Checkpoints of one training, as `<directory>/step-<number>`.

        manager = zero.CheckpointManager("ckpt", keep=3, every=1000, asynchronous=True)
        extra = manager.restore(model, opt) or {"epoch": 0}
        for step, batch in enumerate(batches, start=1):
            ...
            manager.step(step, model, opt, extra={"epoch": epoch})
        manager.close()

    All ranks make the same calls, but for `latest` and `best`, which only look.

    Args:
        directory: The folder; made by the first save.
        keep: The newest so many stay, and the best one beside them; None: all.
        every: `step()` saves at multiples of this many steps; None: whenever it is called.
        mode: Whether a lower ("min") or a higher ("max") metric is better.
        asynchronous: Copy this rank's share and write it in a thread, while training goes on.
            One save is under way at most: the next one waits for it. An error is raised by the
            next call, on all ranks.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        every: int | None = None,
        *,
        mode: str = "min",
        asynchronous: bool = False,
    ) -> None:
        self._folder = CheckpointFolder(
            absolute(directory), Policy(keep, every, mode), asynchronous=asynchronous
        )
        self._ranks: Collectives | None = None

    @abc.abstractmethod
    def _training(self, model: Any, opt: Any, **options: Any) -> session.Training:
        """What an adapter knows of a model and its optimizer."""

    # -- what a script calls ----------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        return self._folder.folder

    @property
    def every(self) -> int | None:
        return self._folder.policy.every

    @property
    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return self._folder.latest()

    @property
    def best(self) -> Path | None:
        """The one with the best `metric`."""
        return self._folder.best()

    def step(
        self,
        step: int,
        model: Any,
        opt: Any = None,
        extra: Any = None,
        **options: Any,
    ) -> Path | None:
        """`save`, if a checkpoint is due at this step; else nothing."""
        if not self._folder.policy.due(step):
            return None
        return self.save(step, model, opt, extra, **options)

    def save(
        self,
        step: int,
        model: Any,
        opt: Any = None,
        extra: Any = None,
        *,
        metric: float | None = None,
        **options: Any,
    ) -> Path:
        """Save now, and remove what is not to be kept.

        Args:
            step: Number of the checkpoint.
            model, opt, extra: As for `zero.save`.
            metric: How good it is; that of rank 0 counts.
            **options: Of `zero.save`.
        """
        notes = session.Notes(extra, step, check_metric(metric))
        ranks, plan = session.plan_save(self._training(model, opt, **options), notes)
        self._adopt(ranks)
        return self._folder.save(step, ranks, plan)

    def restore(
        self,
        model: Any,
        opt: Any = None,
        *,
        which: str | int = "latest",
        strict: bool = True,
        restore_rng: bool = True,
        **options: Any,
    ) -> Any:
        """Load the latest checkpoint, the best, or that of a step; returns its `extra`.

        Does nothing and returns None where there is none yet.

        Args:
            model, opt: As for `zero.load`.
            which: "latest", "best" or the number of a step.
            strict, restore_rng, **options: As for `zero.load`.
        """
        training = self._training(model, opt, **options)
        ranks = training.meet(Call.LOAD)
        self.wait()
        _, found = together(ranks, "which", lambda: self._choose(which))
        # The first rank's word counts: another may not see a new folder yet.
        if not found[0]:
            return None
        path = Path(found[0])
        return session.load(path, training, strict=strict, restore_rng=restore_rng)

    def _choose(self, which: str | int) -> str:
        if isinstance(which, int):
            return str(self._folder.path(which))
        if which not in ("latest", "best"):
            raise ValueError(f'which must be "latest", "best" or a step, got {which!r}')
        path = self.latest if which == "latest" else self.best
        return "" if path is None else str(path)

    def _adopt(self, ranks: Collectives) -> None:
        if self._ranks is None and ranks.rank == 0:
            self._folder.clean()
        self._ranks = ranks

    def wait(self) -> None:
        """Return when the save under way is complete; raises if it failed."""
        if self._ranks is not None:
            self._folder.wait(self._ranks)

    def close(self) -> None:
        """The end of training: wait for the last save."""
        self.wait()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, failed: Any, *_: Any) -> None:
        # After an exception the other ranks may not come: the thread finishes by itself.
        if failed is None:
            self.close()
