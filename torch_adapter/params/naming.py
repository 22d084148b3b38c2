"""Names and bucket groups of a model's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zerohvd.torch.params.owned import NamedParam
from zerohvd.training import naming

_MOVABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def name_parameters(
    groups: Sequence[Sequence[Any]],
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    *,
    first_group: int = 0,
    is_deferred: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> list[NamedParam]:
    """Every parameter of an optimizer once, in the order of the model, with its name.

    Args:
        groups: The parameters of each group, or (name, parameter) pairs.
        named_parameters: Names from the model, for parameters that come without.
        first_group: Number of the first group, for parameters without any name.
        is_deferred: Whether a tensor without memory will get its values later.
    """
    names = naming.name_params(groups, named_parameters, first_group=first_group)
    for param, name in names.items():
        _check_movable(name, param, is_deferred)
    return [NamedParam(name, param) for param, name in names.items()]


def _check_movable(
    name: str, param: torch.nn.Parameter, is_deferred: Callable[[torch.Tensor], bool]
) -> None:
    if isinstance(param, torch.nn.parameter.UninitializedParameter):
        raise ValueError(
            f"parameter {name!r} of a lazy module has no shape yet: run the model once on a "
            "batch, on every rank, before making the optimizer"
        )
    if param.is_meta and not is_deferred(param):
        raise ValueError(
            f"parameter {name!r} is on the meta device and has no values: materialise the model "
            "(model.to_empty(device=...), then its initialisation) before making the optimizer, or "
            "build it inside `with zero.deferred_init():` for zeroify(stage=3)"
        )
    frozen = not (param.is_floating_point() or param.is_complex())  # no gradient, ever
    if param.dtype not in _MOVABLE and not frozen:
        raise ValueError(
            f"parameter {name!r} is {param.dtype}; gradients of "
            f"{', '.join(str(d) for d in _MOVABLE)} can be reduced"
        )
    if param.is_sparse or param.layout != torch.strided:
        raise ValueError(f"parameter {name!r} is not a dense tensor")


def bucket_groups(
    named: Sequence[NamedParam], groups: int | list[list[torch.Tensor]] | None
) -> list[NamedParam]:
    """Keep Horovod's explicit groups together, and apart from others."""
    number = naming.group_numbers(groups, lambda member: isinstance(member, torch.Tensor))
    return [dataclasses.replace(n, group=number.get(n.param, 0)) for n in named]


def groups_bucket_bytes(
    named: Sequence[NamedParam], groups: int | list[list[torch.Tensor]] | None
) -> int | None:
    """The bucket size that gives about `groups` buckets; None where that was not asked for."""
    return naming.groups_bucket_bytes(groups, sum(n.spec.nbytes for n in named))
