"""Callbacks for `fit` on many ranks; Horovod's own do not work on Keras 3."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from zerohvd.keras import keras_hooks, saving
from zerohvd.keras.broadcasting import broadcast_variables


class MetricAverage(keras.callbacks.Callback):
    """Average the metrics of an epoch over the ranks, by how much each rank's is worth.

    A metric that is a mean counts as much as the samples (or sample weights) it is the mean of,
    any other as much as the samples of the loss: ranks may have different numbers of them.

    Put it first: callbacks behind it (ReduceLROnPlateau, EarlyStopping, Checkpoint) then see the
    same numbers on all ranks and decide alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, float] = {}
        self._tested = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._counts, self._tested = {}, False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Validation begins where training has ended, and starts the same metrics afresh.
        if not self._tested:
            self._counts.update(_counts(self.model))

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        self._counts.update({f"val_{n}": c for n, c in _counts(self.model).items()})
        self._tested = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs:
            return
        if not self._tested:
            self._counts.update(_counts(self.model))
        names = sorted(k for k, v in logs.items() if np.ndim(v) == 0)
        values = np.array([float(logs[n]) for n in names], np.float64)
        counts = np.array([self._count(n) for n in names], np.float64)
        # A mean of no samples may be NaN, and must not spoil those of other ranks.
        sent = np.stack([np.where(counts > 0, values * counts, 0.0), counts, values])
        ranks = keras_hooks.ranks_of(self.model)
        summed = ranks.allreduce(ranks.from_numpy(sent), name="zero/metrics")
        total, count, plain = ranks.to_numpy(summed)
        # Nobody counted what a train_step of one's own returns.
        mean = np.where(count > 0, total / np.where(count > 0, count, 1.0), plain / ranks.size)
        logs.update(zip(names, map(float, mean), strict=True))

    def _count(self, name: str) -> float:
        samples = self._counts.get("val_loss" if name.startswith("val_") else "loss", 1.0)
        return self._counts.get(name, samples)


def _counts(model: Any) -> dict[str, float]:
    """How much each mean among the model's metrics is the mean of."""
    found: dict[str, float] = {}
    several: set[str] = set()
    for metric in model.metrics:
        for part in getattr(metric, "metrics", None) or [metric]:
            if isinstance(part, keras.metrics.Mean):
                if part.name in found:
                    several.add(part.name)
                found[part.name] = float(part.count)
    return {name: count for name, count in found.items() if name not in several}


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
        size = keras_hooks.ranks_of(self.model).size
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
        broadcast_variables(floats, keras_hooks.ranks_of(self.model), self.root)


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
            ranks = keras_hooks.ranks_of(self.model)
            saving.on_one_rank(lambda: self.model.save_weights(path), ranks)
        else:
            saving.save_model(self.model, path)

    def _is_best(self, logs: dict[str, Any]) -> bool:
        if self.monitor not in logs:
            raise ValueError(
                f"Checkpoint monitors {self.monitor!r}, but the metrics are {sorted(logs)}"
            )
        # All ranks follow rank 0: they must all save, or none.
        value = keras_hooks.ranks_of(self.model).broadcast_object(
            float(logs[self.monitor]), name="zero/monitor"
        )
        better = self.best is None or (
            value < self.best if self.mode == "min" else value > self.best
        )
        if better:
            self.best = value
        return better
