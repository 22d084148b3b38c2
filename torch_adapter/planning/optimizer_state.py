"""What an optimizer keeps, found by letting a copy of it make two steps."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from zerohvd.planning.workload import OptimizerCost
from zerohvd.torch.communication import arrays
from zerohvd.torch.planning.micro_step import AllocationTracker

_ELEMENTS = 1 << 12  # of a parameter that stands for others


def optimizer_cost(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.nn.Parameter],
    updated: Sequence[str],
    *,
    whole: bool,
) -> OptimizerCost:
    """What the optimizer holds of these parameters.

    Args:
        updated: Per parameter: the dtype that is updated.
        whole: It gets whole parameters, and its state may depend on their shapes.
    """
    name = type(optimizer).__name__
    group_of = {p: g for g in optimizer.param_groups for p in g["params"]}
    found: dict[Any, tuple[int, int, int]] = {}

    def probed(param: torch.nn.Parameter, dtype: str) -> tuple[int, int, int]:
        if not param.numel():
            return 0, 0, 0  # it is in no bucket
        shape = tuple(param.shape) if whole else (_ELEMENTS,)
        group = group_of[param]
        key = (shape, dtype, id(group))
        if key not in found:
            found[key] = _probe(optimizer, group, shape, arrays.dtype_of(dtype))
        return found[key]

    each = [probed(p, d) for p, d in zip(params, updated, strict=True)]
    if whole:
        temporary = max(
            (t / max(1, p.numel()) for p, (_, _, t) in zip(params, each, strict=True)), default=0.0
        )
        states = {i: elements + rest for i, (elements, rest, _) in enumerate(each)}
        return OptimizerCost(name=name, per_element={}, whole=states, temporary=temporary)
    per_element: dict[str, float] = {}
    for dtype, (elements, _, _) in zip(updated, each, strict=True):
        per_element[dtype] = max(per_element.get(dtype, 0.0), elements / _ELEMENTS)
    return OptimizerCost(
        name=name,
        per_element=per_element,
        per_piece=max((rest for _, rest, _ in each), default=0),
        temporary=max((t for _, _, t in each), default=0) / _ELEMENTS,
    )


def _probe(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: Any, dtype: torch.dtype
) -> tuple[int, int, int]:
    """Bytes of state with an element for each of the parameter's, of other state, and temporary."""
    small = torch.Size(shape).numel() <= _ELEMENTS
    try:
        # Kernels of the meta device allocate more than real ones: only where memory matters.
        like = torch.empty(shape, dtype=dtype, device="cpu" if small else "meta")
        return _steps(optimizer, group, like.zero_())
    except (NotImplementedError, RuntimeError, TypeError):
        if small:
            raise
        # Some look at values, which the meta device does not have.
        return _steps(optimizer, group, torch.zeros(shape, dtype=dtype, device="cpu"))


def _steps(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], like: torch.Tensor
) -> tuple[int, int, int]:
    param = torch.nn.Parameter(like)
    param.grad = torch.empty_like(like) if like.is_meta else torch.zeros_like(like)
    probe = copy.copy(optimizer)
    # torch's own copy drops what a class of the user's has added.
    own = {k: v for k, v in vars(optimizer).items() if not k.startswith("_")}
    vars(probe).update({**own, "state": defaultdict(dict)})
    vars(probe)["param_groups"] = [{**group, "params": [param]}]
    with torch.no_grad():
        probe.step()
        with AllocationTracker() as tracker:
            probe.step()
    elements = rest = 0
    for tensor in arrays.tensors_in(probe.state.values()):
        if tensor.shape == like.shape:
            elements += tensor.untyped_storage().nbytes()
        else:
            rest += tensor.untyped_storage().nbytes()
    return elements, rest, tracker.most
