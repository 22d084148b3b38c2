"""Names and bucket groups of a model's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zerohvd.torch.params.owned import NamedParam

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
    names: dict[torch.nn.Parameter, str] = {}
    params: list[torch.nn.Parameter] = []
    for g, group in enumerate(groups, start=first_group):
        for i, entry in enumerate(group):
            name, param = entry if isinstance(entry, tuple) else (f"group{g}.{i}", entry)
            names[param] = name
            params.append(param)
    if named_parameters is not None:
        given = _check_named(named_parameters)
        missing = [n for p, n in names.items() if p not in given]
        if missing:
            raise ValueError(
                f"named_parameters names {len(given)} parameters, but the optimizer has "
                f"{len(missing)} that are not among them (the first: {missing[0]}). "
                "Pass model.named_parameters() of the whole model."
            )
        names.update((p, n) for p, n in given.items() if p in names)
        # The model's order is that of the forward pass, which optimizer groups may have mixed.
        params = [p for p in given if p in names]
    for param in params:
        _check_movable(names[param], param, is_deferred)
    return [NamedParam(names[p], p) for p in params]


def _check_named(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> dict[torch.nn.Parameter, str]:
    given: dict[torch.nn.Parameter, str] = {}
    seen: set[str] = set()
    for entry in named_parameters:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError(
                "named_parameters must be (name, parameter) pairs, as model.named_parameters() "
                f"gives them; got {type(entry).__name__}"
            )
        name, param = entry
        if name in seen:
            raise ValueError(f"named_parameters has the name {name!r} twice; names must be unique")
        seen.add(name)
        given.setdefault(param, name)  # a tied parameter goes by its first name
    return given


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
    if param.dtype not in _MOVABLE:
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
    if groups is None or isinstance(groups, int):
        if isinstance(groups, int) and groups < 0:
            raise ValueError(f"groups must be at least 0, got {groups}")
        return list(named)
    number: dict[Any, int] = {}
    for g, members in enumerate(groups, start=1):
        for member in members:
            if not isinstance(member, torch.Tensor):
                raise ValueError(f"groups must be lists of tensors, got {type(member).__name__}")
            if member in number:
                raise ValueError("groups: a parameter is in two groups; it can be in one only")
            number[member] = g
    return [dataclasses.replace(n, group=number.get(n.param, 0)) for n in named]


def groups_bucket_bytes(
    named: Sequence[NamedParam], groups: int | list[list[torch.Tensor]] | None
) -> int | None:
    """The bucket size that gives about `groups` buckets; None where that was not asked for."""
    if not isinstance(groups, int) or groups == 0:
        return None
    total = sum(n.param.numel() * n.param.element_size() for n in named)
    return max(1, -(-total // groups))
