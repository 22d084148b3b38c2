"""What ranks do together while `fit` runs: metrics, learning rates, checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from zerohvd.checkpoint.errors import on_one_rank
from zerohvd.communication.metrics import Snapshot
from zerohvd.keras import compat
from zerohvd.keras.checkpoint import whole_model
from zerohvd.keras.checkpoint.api import CheckpointManager
from zerohvd.keras.fit import metrics
from zerohvd.keras.optimizer.distributed import ranks_of
from zerohvd.keras.params.broadcasting import broadcast_variables
from zerohvd.training.monitor import check_mode, improvement


class MetricAverage(keras.callbacks.Callback):
    """Report the metrics of an epoch as if one process had seen the samples of all ranks.

        model.fit(data, callbacks=[zero.callbacks.MetricAverage(), ...])
        model.evaluate(data, callbacks=[zero.callbacks.MetricAverage()])       # on all ranks

    The states of the metrics are added up, not their results averaged: so that is exact, to
    rounding, for the loss and for every metric that adds up over samples, which all of
    keras.metrics do (means, AUC, precision and recall, F-scores, R2, IoU). A metric of your own
    says what its variables are, or rank 0 warns of it; or each of several variables by its name:

        class Peak(keras.metrics.Metric):
            across_ranks = "max"          # "sum", "mean", "max", "min", "product" or "last"

        class Range(keras.metrics.Metric):
            across_ranks = {"low": "min", "high": "max"}

    "last" is what the last rank has, which has the last samples of every batch. Metric functions
    should return one value per sample: one number for a batch is computed of each rank's part, and
    averaged. So are other numbers, such as a train_step of your own may return.

    Put it first: callbacks behind it (ReduceLROnPlateau, EarlyStopping, Checkpoint) then see the
    same numbers on all ranks and decide alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_epoch = False
        self._trained: Snapshot | None = None
        self._tested: Snapshot | None = None
        self.evaluated: dict[str, Any] = {}  # what the last `evaluate` outside of `fit` gave

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch, self._trained, self._tested = True, None, None

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        # Validation begins where training has ended, and starts the same metrics afresh.
        if self._in_epoch and self._trained is None:
            self._trained = metrics.snapshot(self.model)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        here = metrics.snapshot(self.model)
        if self._in_epoch:
            self._tested = here
            return
        logs = {} if logs is None else logs
        ranks = ranks_of(self.model)
        self.evaluated = metrics.together(self.model, here, logs, ranks, "zero/evaluated")
        logs.update(self.evaluated)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._in_epoch = False
        logs = {} if logs is None else logs
        ranks = ranks_of(self.model)
        val = {k[len("val_") :]: v for k, v in logs.items() if k.startswith("val_")}
        train = {k: v for k, v in logs.items() if not k.startswith("val_")}
        here = self._trained or metrics.snapshot(self.model)
        logs.update(metrics.together(self.model, here, train, ranks, "zero/metrics"))
        here = self._tested or here
        found = metrics.together(self.model, here, val, ranks, "zero/val_metrics")
        logs.update({f"val_{name}": value for name, value in found.items()})


class LearningRateWarmup(keras.callbacks.Callback):
    """Raise the learning rate from 1/N of `initial_lr` to `initial_lr`, step by step.

    The common batch of N ranks is N times that of one: scale the learning rate by N and warm up.

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
        size = ranks_of(self.model).size
        assert self.initial_lr is not None  # on_train_begin has set it
        rate = self.initial_lr * (1 + progress * (size - 1)) / size
        self.model.optimizer.learning_rate = rate
        if progress >= 1.0:
            self._done = True
            if self.verbose and hvd.rank() == 0:
                print(f"zerohvd: learning rate warm-up is done, now {rate:g}")


class LearningRateSchedule(keras.callbacks.Callback):
    """Multiply a learning rate by a factor from one epoch to another, as Horovod's callback does.

        LearningRateSchedule(0.1, 1.0, start_epoch=5, end_epoch=30)
        LearningRateSchedule(0.1, 0.1, start_epoch=30)                  # 0.1 ** (epoch - 30)
        LearningRateSchedule(0.1, lambda epoch: 0.95 ** epoch, staircase=False)

    Args:
        initial_lr: What is multiplied.
        multiplier: A function of the epoch, or the base of an exponential decay.
        start_epoch: The first epoch it holds for.
        end_epoch: The first epoch it holds no longer; None: to the end.
        staircase: Change it once per epoch. Otherwise with every step, at fractions of epochs.
        steps_per_epoch: For staircase=False, where the dataset does not know its length.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.steps_per_epoch = staircase, steps_per_epoch
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda e: multiplier ** (e - start_epoch)
        )
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        if self.staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.staircase:
            return
        steps = self.steps_per_epoch or self.params.get("steps")
        if not steps:
            raise ValueError(
                "LearningRateSchedule(staircase=False) needs steps_per_epoch: the dataset does "
                "not know its length"
            )
        self._set(self._epoch + batch / steps)

    def _set(self, epoch: float) -> None:
        ended = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch >= self.start_epoch and not ended:
            self.model.optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)


class BroadcastWeights(keras.callbacks.Callback):
    """Give all ranks the weights of one rank when training begins.

    Not needed for initial weights, which are broadcast when the optimizer is built; for weights
    that one rank alone loaded later.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self.root = root

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.root != 0 and not self.model.variables:
            raise ValueError(
                "the model has no variables yet, and would start with those of rank 0, not "
                f"{self.root}: build it before fit, with model.build(shape) or by calling it once"
            )
        # Seeds of random generators are whole numbers, and should differ between ranks.
        floats = [v for v in self.model.variables if "float" in str(v.dtype)]
        broadcast_variables(floats, ranks_of(self.model), self.root)


class Checkpoint(keras.callbacks.Callback):
    """Save while training: whole models in files, or sharded checkpoints in a folder.

    A path that ends with `.keras` or `.h5` is a file: after an epoch one rank writes it, with the
    optimizer state of all ranks. Any other path is the folder of a `zero.CheckpointManager`: every
    rank writes its own part, and the next `fit` with the same path, at any number of ranks and any
    stage, resumes where this one stopped, `initial_epoch` included.

    Args:
        filepath: A file may contain `{epoch}` and names of metrics, as for keras' ModelCheckpoint.
        monitor: What `save_best_only` and the best checkpoint look at; averaged if MetricAverage
            comes first.
        save_best_only: Save only after epochs that are better than all before.
        save_weights_only: Files: `model.save_weights` instead of the whole model.
        mode: Whether a lower ("min") or a higher ("max") value is better.
        keep: Folders: the newest so many checkpoints stay, and the best one; None: all.
        every: Folders: save after so many steps instead of after each epoch.
        asynchronous: Folders: write in a thread, while training goes on.
        resume: Folders: load the latest checkpoint when the first `fit` begins. An epoch that was
            interrupted starts from its beginning.
    """

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        *,
        keep: int | None = 3,
        every: int | None = None,
        asynchronous: bool = False,
        resume: bool = True,
    ) -> None:
        super().__init__()
        self.filepath, self.monitor, self.mode = str(filepath), monitor, check_mode(mode)
        self.save_best_only, self.save_weights_only = save_best_only, save_weights_only
        self.best: float | None = None
        self.manager: CheckpointManager | None = None
        self.resume = resume
        self._epoch, self._saved = 0, 0
        if not self.filepath.endswith((".keras", ".h5")):
            if save_weights_only:
                raise ValueError(
                    "save_weights_only needs a path that ends with .weights.h5; a folder of "
                    "checkpoints holds everything"
                )
            self.manager = CheckpointManager(
                self.filepath, keep, every, mode=mode, asynchronous=asynchronous
            )
        elif every is not None or asynchronous:
            raise ValueError(
                f"every and asynchronous need a folder to save to, and {self.filepath} is a file"
            )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.manager is None:
            return
        if self.resume:
            self.resume = False  # a second fit() continues with the model as it is
            extra = self.manager.restore(self.model)
            if extra is not None:
                self._epoch = extra["epoch"]
                self.best = extra["best"]
                compat.set_initial_epoch(self.model, self._epoch)
        self._saved = self._step()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.manager is not None:
            compat.set_initial_epoch(self.model, None)
            self.manager.close()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        every = None if self.manager is None else self.manager.every
        # Several steps may lie between two calls (steps_per_execution).
        if every is not None and self._step() // every > self._saved // every:
            self._save_folder(self._epoch, None)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = logs or {}
        if self.save_best_only:
            ranks = ranks_of(self.model)
            better = improvement(logs, self.monitor, self.best, self.mode, ranks)
            if better is None:
                return
            self.best = better
        if self.manager is not None:
            if self.manager.every is None:
                self._save_folder(epoch + 1, logs.get(self.monitor))
            return
        path = self.filepath.format(epoch=epoch + 1, **logs)
        if self.save_weights_only:
            on_one_rank(lambda: self.model.save_weights(path), ranks_of(self.model))
        else:
            whole_model.save_model(self.model, path)

    def _step(self) -> int:
        return int(np.asarray(self.model.optimizer.iterations))

    def _save_folder(self, epoch: int, metric: float | None) -> None:
        assert self.manager is not None
        self._saved = self._step()
        extra = {"epoch": epoch, "best": self.best}
        self.manager.save(self._saved, self.model, extra=extra, metric=metric)


# -- the names and arguments of horovod.tensorflow.keras.callbacks ---------------------------------


class BroadcastGlobalVariablesCallback(BroadcastWeights):
    """`BroadcastWeights`. The optimizer's state is sharded: no rank has what others need."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__(root_rank)


class MetricAverageCallback(MetricAverage):
    """`MetricAverage`."""

    def __init__(self, device: str = "") -> None:
        super().__init__()


class LearningRateWarmupCallback(LearningRateWarmup):
    """`LearningRateWarmup`. Keras 3 cannot correct the momentum, which is a constant of a step."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(initial_lr, warmup_epochs, steps_per_epoch, verbose)
        self.momentum_correction = momentum_correction

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        _warn_of_momentum(self)
        super().on_train_begin(logs)


class LearningRateScheduleCallback(LearningRateSchedule):
    """`LearningRateSchedule`. Keras 3 cannot correct the momentum, a constant of a step."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(initial_lr, multiplier, start_epoch, end_epoch, staircase, steps_per_epoch)
        self.momentum_correction = momentum_correction

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        _warn_of_momentum(self)


def _warn_of_momentum(callback: Any) -> None:
    momentum = getattr(callback.model.optimizer, "momentum", None)
    if momentum and callback.momentum_correction and ranks_of(callback.model).rank == 0:
        warnings.warn(
            f"the momentum stays {momentum:g} while {type(callback).__name__} changes the learning "
            "rate: Keras 3 makes it a constant of the step. Pass momentum_correction=False if that "
            "is fine.",
            stacklevel=2,
        )
