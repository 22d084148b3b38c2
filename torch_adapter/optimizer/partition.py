"""Which optimizers may be cut anywhere, which need whole parameters, which cannot be sharded."""

from __future__ import annotations

import inspect

import torch

_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.Adadelta,
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each element's update is known to depend on that element alone.

    A subclass that brings a `step` of its own may compute anything from whole tensors (as LARS
    does on top of SGD), so it does not count.
    """
    # torch wraps `step` of every class it makes an instance of.
    step = inspect.unwrap(type(optimizer).step)
    return any(
        isinstance(optimizer, cls) and step is inspect.unwrap(cls.step) for cls in _ELEMENTWISE
    )


def choose_partition(optimizer: torch.optim.Optimizer, asked: str) -> str:
    """"flat" or "parameter" for this optimizer."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS cannot be sharded: each step uses inner products over all parameters and "
            "several evaluations of the closure. Use an optimizer that updates parameters one "
            "by one, such as AdamW."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "SparseAdam cannot be sharded: it needs sparse gradients, and gradients are reduced "
            "as dense buckets. Use Adam; sparse embedding gradients are accepted with it."
        )
    if asked != "auto":
        return asked
    return "flat" if is_elementwise(optimizer) else "parameter"
