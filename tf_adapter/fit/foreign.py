"""Callbacks that know nothing of ranks: Keras' own, and Horovod's for older Keras.

- `ModelCheckpoint` on one rank: all ranks collect the state that it is going to save.
- An epoch ends on all ranks, or they are told: a callback may stop one of them, such as
  TerminateOnNaN, which would leave the others waiting in the next step.
- Callbacks that decide by this rank's numbers (EarlyStopping, ReduceLROnPlateau): after an epoch
  ranks compare what was decided. Without it one rank would leave the others waiting for ever, or
  train its share of the variables at another learning rate.
- Horovod's callbacks, which fail on Keras 3: refused with the line to write.
"""

from __future__ import annotations

import contextlib
import inspect
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from zerohvd.communication.agreement import check_same_decision
from zerohvd.communication.collectives import Collectives
from zerohvd.communication.rendezvous import Call
from zerohvd.errors import DisagreementError, ShardedStateError
from zerohvd.keras.fit.callback_list import given_callbacks, with_callbacks
from zerohvd.keras.optimizer import entry, state
from zerohvd.keras.optimizer.distributed import optimizer_of, ranks_of
from zerohvd.peers.steps import StepWatch


def run(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `fit` with callbacks around those that were given."""
    if optimizer_of(model) is None:
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs)
    found = given_callbacks(given.arguments)
    _refuse_horovods(found)
    ranks = ranks_of(model)
    if ranks.size == 1:
        return original(*given.args, **given.kwargs)
    before, after, watch = _around(found, ranks)
    with with_callbacks(given.arguments, before, after), contextlib.closing(watch):
        return original(*given.args, **given.kwargs)


def _refuse_horovods(callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        name = type(callback).__name__
        if type(callback).__module__.startswith("horovod."):
            raise TypeError(
                f"Horovod's {name} does not work on Keras 3. zerohvd has one of the same name: "
                f"write zero.callbacks.{name}(...), or change the import of Horovod to "
                "`import zerohvd.keras as hvd`, which has hvd.callbacks and all the rest"
            )


class _Around(NamedTuple):
    before: list[Any]
    after: list[Any]
    watch: StepWatch


def _around(callbacks: Sequence[Any], ranks: Collectives) -> _Around:
    """Callbacks to run before and after the user's, on all ranks alike."""
    mine = [c for c in callbacks if isinstance(c, keras.callbacks.ModelCheckpoint)]
    whole = [c for c in mine if not c.save_weights_only]
    said = [[c.filepath, c.save_freq] for c in whole]
    monitors = [c.monitors_every for c in callbacks if hasattr(c, "monitors_every")]
    mine = [said, monitors, socket.gethostname()]
    told = ranks.allgather_object(mine, name="zero/fit/checkpoints")
    _check_monitors([found[1] for found in told])
    everyone = [found[0] for found in told]
    savers = [rank for rank, found in enumerate(everyone) if found]
    # Every rank sees the same, so all of them raise, or none does.
    for path, frequency in everyone[savers[0]] if savers else ():
        _check_checkpoint(path, frequency, savers)
    watch = StepWatch(ranks, [found[2] for found in told], "model.fit()")
    if not savers:
        return _Around([_EndTogether()], [_Decisions(ranks), _Watched(watch)], watch)
    before = [_EndTogether(), _Collect(savers[0], ranks)]
    return _Around(before, [_Forget(), _Decisions(ranks), _Watched(watch)], watch)


def _check_monitors(everyone: Sequence[Sequence[int]]) -> None:
    if any(found != everyone[0] for found in everyone):
        said = [f"rank {rank}: every={found}" for rank, found in enumerate(everyone)]
        raise DisagreementError(
            "not all ranks have the same zero.callbacks.Monitor "
            f"({', '.join(said)}). Pass it to fit() on every rank, with the same `every`: it "
            "writes on rank 0 alone by itself"
        )


def _check_checkpoint(path: str, frequency: Any, savers: Sequence[int]) -> None:
    instead = f"zero.callbacks.Checkpoint({path!r}) on all ranks"
    if not path.endswith(".keras"):
        problem = (
            f"an HDF5 file cannot hold a sharded optimizer state: write {instead}, with .keras"
        )
    elif frequency != "epoch":
        problem = f"save_freq={frequency} would save between epochs, on one rank alone: use "
        problem += "zero.callbacks.Checkpoint(folder, every=...) on all ranks"
    elif len(savers) > 1:
        problem = f"ranks {list(savers)} would write the same file: use it on rank 0, or {instead}"
    else:
        return
    raise ShardedStateError(
        f"keras.callbacks.ModelCheckpoint({path!r}): {problem}; or save weights alone, on rank 0: "
        "ModelCheckpoint('….weights.h5', save_weights_only=True)"
    )


class _EndTogether(keras.callbacks.Callback):
    """Meets the other ranks where an epoch has ended, before anybody validates or saves.

    Raises, on all of them, if one is still in a step. If one was stopped in the last step, all are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_met = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._has_met = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.end_epoch()

    def end_epoch(self) -> None:
        """Meet the others, once per epoch: `evaluate` calls this before it asks for anything."""
        optimizer = optimizer_of(self.model)
        if self._has_met or optimizer is None or optimizer.step is None:
            return
        self._has_met = True
        stopped = entry.meet(optimizer.step, Call.EPOCH, [int(self.model.stop_training)])
        if any(here for (here,) in stopped):
            self.model.stop_training = True


class _Watched(keras.callbacks.Callback):
    """Lets ranks that are in a step for long find out who is not. The last of all callbacks: what
    others do at the beginning of a step, such as waiting, comes before it. (Of the end of a step it
    need not know: a callback that does makes Keras wait for the step's metrics.)"""

    def __init__(self, watch: StepWatch) -> None:
        super().__init__()
        self._watch = watch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._watch.begin()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._watch.pause()


class _Collect(keras.callbacks.Callback):
    """Gives the whole optimizer state to the rank that is about to save the model."""

    def __init__(self, root: int, ranks: Collectives) -> None:
        super().__init__()
        self._root, self._ranks = root, ranks

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = optimizer_of(self.model)
        if optimizer is None or optimizer.step is None:
            return
        whole = state.whole_state(optimizer, self._root)
        if self._ranks.rank == self._root:
            optimizer.saved_state = whole


class _Forget(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        optimizer = optimizer_of(self.model)
        if optimizer is not None:
            optimizer.saved_state = None


class _Decisions(keras.callbacks.Callback):
    """Raises after an epoch whose callbacks have decided differently on different ranks."""

    def __init__(self, ranks: Collectives) -> None:
        super().__init__()
        self._ranks = ranks

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        decided = {
            "model.stop_training": bool(self.model.stop_training),
            "the learning rate": float(self.model.optimizer.learning_rate),
        }
        hint = (
            "Put zero.callbacks.MetricAverage() before callbacks that decide by metrics, such as "
            "EarlyStopping and ReduceLROnPlateau: fit(callbacks=[zero.callbacks.MetricAverage(), "
            "...])"
        )
        check_same_decision(self._ranks, decided, hint=hint)
