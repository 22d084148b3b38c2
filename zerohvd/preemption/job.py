"""A training loop that saves when it is asked to, leaves, and goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Any, TypeVar

from zerohvd.checkpoint import together
from zerohvd.checkpoint.manager.checkpoint_manager import CheckpointManager
from zerohvd.communication.collectives import Collectives
from zerohvd.preemption.departure import Departure, Wish

Self = TypeVar("Self", bound="Job")
State = MutableMapping[str, Any]


class Job:
    """What `zero.preemption` gives: enter it before the loop, and tell it of each step.

    Attributes:
        start_step: How many steps have been made already; the number of the first one to make.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        departure: Departure,
        ranks: Callable[[], Collectives],
        *,
        model: Any,
        opt: Any,
        state: State | None,
        options: dict[str, Any],
    ) -> None:
        """
        Args:
            manager: Saves and restores.
            departure: Decides when.
            ranks: Joins the ranks that train together.
            model, opt: As for the manager's `save`.
            state: What else is stored; values with a `state_dict` by that.
            options: Further ones of the manager's `save` and `restore`.
        """
        self.start_step = 0
        self._manager, self._departure, self._ranks = manager, departure, ranks
        self._model, self._opt, self._options = model, opt, options
        self._state = {} if state is None else state
        self._done = 0

    @property
    def resumed(self) -> bool:
        """Whether it goes on from a checkpoint."""
        return self.start_step > 0

    @property
    def seconds_left(self) -> float | None:
        """Until the scheduler ends the job; rank 0 knows, and None where nobody does."""
        return self._departure.seconds_left

    def __enter__(self: Self) -> Self:
        self._departure.begin()
        try:
            stored = self._manager.restore(self._model, self._opt, **self._options)
            if stored is not None:
                self._take(stored)
        except BaseException:
            self._departure.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._departure.end()
        if kind is None:  # after an error the other ranks may not come
            self._manager.close()

    def step_done(self, step: int | None = None) -> None:
        """Say that a step is complete, on all ranks, after `opt.step()`.

        Saves if it is time to; if this job was asked to leave, saves, requeues it and raises
        SystemExit.

        Args:
            step: Its number, counted from 0; the next one unless given.
        """
        self._done = self._done + 1 if step is None else step + 1
        wish = self._departure.after_step()
        every = self._manager.every
        if wish is Wish.NONE and not (every and self._done % every == 0):
            return
        self._save()
        if wish is Wish.LEAVE:
            self._departure.leave(f"Saved step {self._done} in {self._manager.directory}")

    def _save(self) -> None:
        began = time.monotonic()
        ranks = self._ranks()
        _, steps = together(ranks, "step", lambda: self._done)
        if len(set(steps)) > 1:
            raise ValueError(
                f"job.step_done() was called for different steps: {steps} in rank order. Call it "
                "on all ranks after each opt.step(), with the same number or with none"
            )
        extra = {"step": self._done, "state": {k: _stored(v) for k, v in self._state.items()}}
        self._manager.save(self._done, self._model, self._opt, extra, **self._options)
        self._departure.measured(time.monotonic() - began)

    def _take(self, stored: Any) -> None:
        if not isinstance(stored, dict) or not {"step", "state"} <= set(stored):
            raise ValueError(
                f"the checkpoints in {self._manager.directory} were not made by zero.preemption: "
                "give it a folder of its own"
            )
        self.start_step = self._done = stored["step"]
        for key, value in stored["state"].items():
            if hasattr(self._state.get(key), "load_state_dict"):
                self._state[key].load_state_dict(value)
            else:
                self._state[key] = value


def _stored(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
