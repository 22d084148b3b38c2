"""Callbacks for `fit` on many ranks; Horovod's own do not work on Keras 3."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from zerohvd.collectives import HorovodCollectives
from zerohvd.keras import saving
from zerohvd.keras.broadcasting import broadcast_variables


class MetricAverage(keras.callbacks.Callback):
    """Average the metrics of an epoch over the ranks.

    Put it first: callbacks behind it (ReduceLROnPlateau, EarlyStopping, Checkpoint) then see the
    same numbers on all ranks and decide alike.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs:
            return
        ranks = HorovodCollectives(hvd)
        names = sorted(k for k, v in logs.items() if np.ndim(v) == 0)
        mine = ranks.from_numpy(np.array([float(logs[n]) for n in names], np.float64))
        mean = ranks.to_numpy(ranks.allreduce(mine, "average", name="zero/metrics"))
        logs.update(zip(names, map(float, mean), strict=True))


class LearningRateWarmup(keras.callbacks.Callback):
    """Raise the learning rate from 1/N of `initial_lr` to `initial_lr`, step by step.

    For N ranks, whose common batch is N times that of one: scale the learning rate by N and start
    gently.

    Args:
        initial_lr: The learning rate to arrive at; that of the optimizer unless given.
        warmup_epochs: How long it takes.
        steps_per_epoch: Where the dataset does not know its length.
        verbose: Say so when it is done.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: float = 5,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        if warmup_epochs <= 0:
            raise ValueError(f"warmup_epochs must be greater than 0, got {warmup_epochs}")
        self.initial_lr, self.warmup_epochs = initial_lr, warmup_epochs
        self.steps_per_epoch, self.verbose = steps_per_epoch, verbose
        self._epoch = 0
        self._done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.initial_lr is None:
            self.initial_lr = float(self.model.optimizer.learning_rate)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._done:
            return
        steps = self.steps_per_epoch or self.params.get("steps")
        if not steps:
            raise ValueError(
                "LearningRateWarmup needs steps_per_epoch: the dataset does not know its length"
            )
        progress = min(1.0, (self._epoch + batch / steps) / self.warmup_epochs)
        size = hvd.size()
        rate = self.initial_lr * (1 + progress * (size - 1)) / size
        self.model.optimizer.learning_rate = rate
        if progress >= 1.0:
            self._done = True
            if self.verbose and hvd.rank() == 0:
                print(f"zerohvd: learning rate warm-up is done, now {rate:g}")


class BroadcastWeights(keras.callbacks.Callback):
    """Give all ranks the weights of one rank when training begins.

    Not needed for initial weights, which are broadcast when the optimizer is built; for weights
    that one rank alone loaded later.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self.root = root

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Seeds of random generators are whole numbers, and should differ between ranks.
        floats = [v for v in self.model.variables if "float" in str(v.dtype)]
        broadcast_variables(floats, HorovodCollectives(hvd), self.root)


class Checkpoint(keras.callbacks.Callback):
    """Save the model after an epoch: one rank writes, with the optimizer state of all ranks.

    Args:
        filepath: May contain `{epoch}` and names of metrics, as for keras' ModelCheckpoint.
        monitor: What `save_best_only` looks at; averaged if MetricAverage comes first.
        save_best_only: Keep the best epoch.
        save_weights_only: `model.save_weights` instead of the whole model.
        mode: "min" or "max".
    """

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
    ) -> None:
        super().__init__()
        if mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", got {mode!r}')
        self.filepath, self.monitor, self.mode = str(filepath), monitor, mode
        self.save_best_only, self.save_weights_only = save_best_only, save_weights_only
        self.best: float | None = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        if self.save_best_only and not self._is_best(logs):
            return
        path = self.filepath.format(epoch=epoch + 1, **logs)
        if self.save_weights_only:
            saving.on_one_rank(lambda: self.model.save_weights(path))
        else:
            saving.save_model(self.model, path)

    def _is_best(self, logs: dict[str, Any]) -> bool:
        if self.monitor not in logs:
            raise ValueError(
                f"Checkpoint monitors {self.monitor!r}, but the metrics are {sorted(logs)}"
            )
        # All ranks follow rank 0: they must all save, or none.
        value = HorovodCollectives(hvd).broadcast_object(
            float(logs[self.monitor]), name="zero/monitor"
        )
        better = self.best is None or (
            value < self.best if self.mode == "min" else value > self.best
        )
        if better:
            self.best = value
        return better
