"""The arguments of Horovod's DistributedOptimizer for Keras, and what they mean here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import horovod.tensorflow as hvd

# They say where and in which portions Horovod works, and change no result.
_WITHOUT_EFFECT = (
    "device_dense",
    "device_sparse",
    "gradient_predivide_factor",
    "groups",
    "num_groups",
    "scale_local_gradients",
    "sparse_as_dense",
)
_OPS = {hvd.Average: "Average", hvd.Sum: "Sum", "Average": "Average", "Sum": "Sum"}


class Arguments(NamedTuple):
    """Those that change a result, as a configuration has them."""

    op: str = "Average"
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False

    def gain(self, size: int) -> float:
        """What a mean over ranks and passes is multiplied with."""
        passes = 1 if self.average_aggregated_gradients else self.backward_passes_per_step
        return float(passes * (size if self.op == "Sum" else 1))

    def as_config(self) -> dict[str, Any]:
        return {k: v for k, v in self._asdict().items() if v != self._field_defaults[k]}


def check(given: Mapping[str, Any]) -> Arguments:
    """The arguments, or an error that says what to write instead."""
    known = {*Arguments._fields, *_WITHOUT_EFFECT}
    unknown = sorted(set(given) - known)
    if unknown:
        raise TypeError(
            f"DistributedOptimizer got unexpected arguments {unknown}. Options of the wrapped "
            "optimizer are given to it: zero.DistributedOptimizer(keras.optimizers.Adam(1e-3, "
            "clipnorm=1.0), stage=2)"
        )
    op = given.get("op", "Average")
    if op not in _OPS:
        raise ValueError(
            f"op must be hvd.Average or hvd.Sum, got {op!r}: shards are updated with sums of "
            "gradients, which Adasum, min, max and product are not. Write op=hvd.Average"
        )
    passes = given.get("backward_passes_per_step", 1)
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an integer of at least 1, got {passes}")
    average = bool(given.get("average_aggregated_gradients", False))
    return Arguments(_OPS[op], passes, average and passes > 1)


def accumulate(inner: Any, passes: int) -> None:
    """Have the optimizer update after so many passes, as gradient_accumulation_steps does."""
    steps = inner.gradient_accumulation_steps
    if passes == 1 or steps == passes:
        return
    if steps:
        raise ValueError(
            f"backward_passes_per_step={passes} and the optimizer's own gradient_accumulation_steps"
            f"={steps} are both set: give one of them"
        )
    inner.gradient_accumulation_steps = passes
