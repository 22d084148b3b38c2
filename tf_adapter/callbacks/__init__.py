"""Callbacks for `fit` on many ranks; Horovod's own do not work on Keras 3."""

from zerohvd.keras.callbacks.monitor import Monitor
from zerohvd.keras.callbacks.training import (
    BroadcastGlobalVariablesCallback,
    BroadcastWeights,
    Checkpoint,
    LearningRateSchedule,
    LearningRateScheduleCallback,
    LearningRateWarmup,
    LearningRateWarmupCallback,
    MetricAverage,
    MetricAverageCallback,
)
from zerohvd.keras.checkpoint.preempting import Preemption

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "BroadcastWeights",
    "Checkpoint",
    "LearningRateSchedule",
    "LearningRateScheduleCallback",
    "LearningRateWarmup",
    "LearningRateWarmupCallback",
    "MetricAverage",
    "MetricAverageCallback",
    "Monitor",
    "Preemption",
]
