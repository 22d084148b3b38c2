"""A model as the tree that the core divides into units."""

from __future__ import annotations

from torch import nn

from zerohvd.layout import ParamSpec
from zerohvd.stage3.planning import ModelPlan, Node, PlannedParam, UnitOptions, plan_units
from zerohvd.torch.communication import arrays


def plan_model(model: nn.Module, options: UnitOptions) -> ModelPlan:
    """Put every parameter of a model into a unit."""
    return plan_units(_node(model, ""), options, base=nn.Module)


def _node(module: nn.Module, name: str, *, compiled: bool = False) -> Node:
    """Return the tree below a module.

    Args:
        compiled: It is inside the wrapper that torch.compile() returns. It is entered through the
            wrapper, and hooks on it would be compiled.
    """
    path = f"{name}." if name else ""
    children = dict(module.named_children())
    inner = children.get("_orig_mod")
    return Node(
        name,
        module,
        type(module if inner is None else inner),
        tuple(
            _node(child, f"{path}{key}", compiled=bool(name) and child is inner)
            for key, child in children.items()
        ),
        tuple(
            PlannedParam(ParamSpec(f"{path}{key}", tuple(p.shape), arrays.dtype_name(p.dtype)), p)
            for key, p in module.named_parameters(recurse=False)
        ),
        is_container=isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)),
        can_be_unit=not compiled,
    )
