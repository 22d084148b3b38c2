"""Numbers that all ranks must compute alike: dtypes, divide factors, norms, clipping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

_NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def master_dtype(param_dtype: str, configured: str | None = None) -> str:
    """The dtype that the optimizer updates parameters of `param_dtype` in.

    Narrow floats are updated in float32 unless configured otherwise: an update that is small
    against its parameter would be rounded away.
    """
    if configured is not None:
        return configured
    return "float32" if param_dtype in _NARROW else param_dtype


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


def local_norm(norms: Sequence[float], p: float) -> tuple[float, str]:
    """What a rank adds to the p-norm over all ranks, and the op that combines the ranks."""
    if math.isinf(p):
        return max(norms, default=0.0), "max"
    return math.fsum(norm**p for norm in norms), "sum"


def local_norms(norms: Iterable[tuple[int, float]], length: int, p: float) -> list[float]:
    """`local_norm` for each of `length` tensors, from (tensor, norm of a part of it) pairs."""
    totals = [0.0] * length
    for index, norm in norms:
        totals[index] = max(totals[index], norm) if math.isinf(p) else totals[index] + norm**p
    return totals


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
