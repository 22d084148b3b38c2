"""Numbers that all ranks must compute alike: divide factors, norms, clipping, loss scale."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class DivideFactors:
    """Multiply a gradient by `before` on the way out and its sum over the ranks by `after`."""

    before: float
    after: float


def divide_factors(average: bool, size: int, predivide: float = 1.0) -> DivideFactors:
    """Split an average over `size` ranks around the sum.

    Dividing by all of `size` before the sum loses small 16-bit gradients, dividing by all of it
    afterwards overflows large ones; `predivide` moves a part of the division to the front.
    """
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor must be greater than 0, got {predivide}")
    if not average:
        if predivide != 1.0:
            raise ValueError(
                "gradient_predivide_factor splits an average: it needs op=Average, not op=Sum"
            )
        return DivideFactors(1.0, 1.0)
    return DivideFactors(1.0 / predivide, predivide / size)


def check_norm_type(norm_type: float) -> float:
    p = float(norm_type)
    if math.isnan(p) or p <= 0:
        raise ValueError(f"norm_type must be greater than 0, or inf, got {norm_type!r}")
    return p


def finish_norm(total: float, norm_type: float) -> float:
    """The norm from the agreed sum of |x|^p (or, for p = inf, from the agreed maximum).

    Norms of shards must not be added: only their p-th powers add up.
    """
    if math.isinf(norm_type):
        return total
    return total ** (1.0 / norm_type) if math.isfinite(total) else total


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply gradients with so that their norm is at most `max_norm`.

    The 1e-6 is torch's, for equal results with `torch.nn.utils.clip_grad_norm_`. A norm that is
    not finite must not turn every gradient into NaN silently, so it does not scale at all.
    """
    if not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling: a value that all ranks change alike, given the agreed overflow."""

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool) -> LossScale:
        """The scale for the next step."""
        if overflow:
            scale = max(self.scale * self.backoff_factor, 2.0**-24)
            return dataclasses.replace(self, scale=scale, good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return dataclasses.replace(self, good_steps=self.good_steps + 1)
        grown = self.scale * self.growth_factor
        return dataclasses.replace(
            self, scale=grown if math.isfinite(grown) else self.scale, good_steps=0
        )
