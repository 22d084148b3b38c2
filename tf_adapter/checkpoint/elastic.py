"""zero.elastic: training that goes on after ranks have been lost."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from horovod.common.elastic import notification_manager

from zerohvd.elastic.copies import LostStateError
from zerohvd.elastic.reset import Notices
from zerohvd.elastic.state import ElasticState, run
from zerohvd.keras.checkpoint.api import CheckpointManager, KerasTraining

__all__ = ["CommitStateCallback", "KerasState", "LostStateError", "run"]


def _listen(notices: Notices) -> None:
    notification_manager.init()
    notification_manager.register_listener(notices)


class KerasState(ElasticState):
    """A training that is committed to memory, and goes on from there; see `zero.elastic.run`.

        state = zero.elastic.KerasState(model, epoch=0)

        @zero.elastic.run
        def train(state):
            commit = zero.elastic.CommitStateCallback(state)
            model.fit(data, initial_epoch=state.epoch, epochs=10, callbacks=[commit])

    Args:
        model: The model, built.
        optimizer: Its optimizer; that which the model was compiled with unless given.
        checkpoints: A CheckpointManager, whose newest checkpoint is loaded where no commit is
            left; save with `extra=state.values()`.
        **values: First values of attributes: numbers, strings, arrays, lists, dicts. They are
            committed too; those of rank 0.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        checkpoints: CheckpointManager | None = None,
        **values: Any,
    ) -> None:
        def training() -> KerasTraining:
            return KerasTraining(model, optimizer, what="zero.elastic.KerasState")

        def from_disk() -> Any:
            assert checkpoints is not None
            return checkpoints.restore(model, optimizer)

        training()  # raises here, not at the first commit
        disk = from_disk if checkpoints is not None else None
        super().__init__(training, None, disk, values, _listen)

    def tells_of_a_loss(self, error: Exception) -> bool:
        # Horovod's own `run` knows three of its operations, and takes the failure of any other for
        # the end of training.
        failed = isinstance(error, tf.errors.OpError) and "Horovod" in str(error)
        return failed or super().tells_of_a_loss(error)


class CommitStateCallback(keras.callbacks.Callback):
    """Commit after epochs of `fit`; on all ranks.

    Args:
        state: With a value `epoch`, which is set to the epoch to go on with.
        every: Commit after so many epochs.
    """

    def __init__(self, state: KerasState, every: int = 1) -> None:
        super().__init__()
        if not isinstance(state, KerasState) or "epoch" not in state.values():
            raise ValueError(
                "CommitStateCallback needs a state that counts epochs: "
                "zero.elastic.KerasState(model, epoch=0)"
            )
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._state, self._every = state, every

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.epoch = epoch + 1
        if (epoch + 1) % self._every == 0:
            self._state.commit()
