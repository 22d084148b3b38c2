"""Ranks with unequal batches: how much each rank's gradient counts."""

from __future__ import annotations

import math
from types import TracebackType


def check_weight(value: float) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(
            f"a weight must be a number >= 0, such as the number of samples in this rank's "
            f"batch; got {value!r}"
        )
    return number


class _Announced:
    """The weight that has been announced for the step to come; None: ranks count alike."""

    value: float | None = None


class weight:
    """Say how much this rank counts in the next step, before its backward pass.

    Gradients are averages over the rank's own batch; with the number of its samples as the
    weight, the result equals one process on the union of all samples. A rank without a batch
    gives 0 and skips its backward pass, but not `opt.step()`. Every rank has to give a weight.

        zero.weight(len(batch))                       # until the next opt.step()
        with zero.weight(len(batch)): loss.backward() # the same
    """

    def __init__(self, value: float) -> None:
        self.value = check_weight(value)
        _Announced.value = self.value

    def __enter__(self) -> weight:
        _Announced.value = self.value
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The step that consumes the gradients still needs it; a failed pass does not.
        if kind is not None:
            _Announced.value = None

    def __repr__(self) -> str:
        return f"zero.weight({self.value:g})"


def announced() -> float | None:
    return _Announced.value


def clear() -> None:
    _Announced.value = None
