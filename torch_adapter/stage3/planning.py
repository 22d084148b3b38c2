"""Which parameters are gathered together: the units of a model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zerohvd.layout import ParamSpec
from zerohvd.torch.communication import arrays

ROOT = "(root)"
PERSIST_BELOW = 256

Choice = type | tuple[type, ...] | Callable[..., bool] | Iterable[nn.Module] | None


@dataclasses.dataclass(frozen=True)
class UnitOptions:
    """What a user can say about units.

    Args:
        units: Which modules are units; None: repeated blocks.
        persist_below: Parameters with fewer elements stay gathered.
        reshard_after_forward: Free a unit's parameters between its forward and backward pass.
    """

    units: Any = None
    persist_below: int = PERSIST_BELOW
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.persist_below, bool) or not isinstance(self.persist_below, int):
            raise TypeError(
                f"persist_below must be a number of elements, got {self.persist_below!r}"
            )
        if self.persist_below < 0:
            raise ValueError(f"persist_below must be at least 0, got {self.persist_below}")
        if not isinstance(self.reshard_after_forward, bool):
            raise TypeError(
                f"reshard_after_forward must be True or False, got {self.reshard_after_forward!r}"
            )


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """A unit before it has memory."""

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]  # with their names in the model
    owners: tuple[nn.Module, ...]  # modules that hold these parameters themselves


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """All parameters of a model, each in one place."""

    units: tuple[UnitPlan, ...]  # in model order; the root is the first
    persistent: tuple[tuple[str, nn.Parameter], ...]

    def specs(self) -> list[ParamSpec]:
        """Every parameter, with its unit as the group: what all ranks must agree on."""
        homes = [(u.name, u.params) for u in self.units] + [("(persistent)", self.persistent)]
        return [
            ParamSpec(name, tuple(p.shape), arrays.dtype_name(p.dtype), unit)
            for unit, params in homes
            for name, p in params
        ]


def plan_units(model: nn.Module, options: UnitOptions) -> ModelPlan:
    """Put every parameter into the nearest unit that all modules which use it lie in.

    A tied parameter, found in several units by identity, goes to their common ancestor.
    """
    chosen = _choose(model, options.units)
    home, names = _homes(model, chosen)
    persistent = {p for p in home if p.numel() < options.persist_below}
    units = []
    for module, name in {model: ROOT, **chosen}.items():
        params = [p for p, unit in home.items() if unit is module and p not in persistent]
        if params or module is model:
            held = set(params)
            owners = [m for m in module.modules() if held & set(m.parameters(recurse=False))]
            named = tuple((names[p], p) for p in params)
            units.append(UnitPlan(name, module, named, tuple(owners)))
    small = tuple((n, p) for p, n in names.items() if p in persistent)
    return ModelPlan(tuple(units), small)


def _homes(
    model: nn.Module, chosen: dict[nn.Module, str]
) -> tuple[dict[nn.Parameter, nn.Module], dict[nn.Parameter, str]]:
    """For every parameter its unit's module, and its first name."""
    chains: dict[nn.Parameter, tuple[nn.Module, ...]] = {}
    names: dict[nn.Parameter, str] = {}
    for path, module, chain in _walk(model, "", (model,), chosen):
        for key, param in module.named_parameters(recurse=False):
            names.setdefault(param, f"{path}{key}")
            known = chains.get(param)
            chains[param] = chain if known is None else _common(known, chain)
    return {p: chain[-1] for p, chain in chains.items()}, names


def _walk(
    module: nn.Module, path: str, chain: tuple[nn.Module, ...], chosen: dict[nn.Module, str]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Every module under every name it has, with the units around it, outermost first."""
    yield path, module, chain
    for key, child in module.named_children():
        inner = (*chain, child) if child in chosen and child not in chain else chain
        yield from _walk(child, f"{path}{key}.", inner, chosen)


def _common(a: tuple[nn.Module, ...], b: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    # One unit used in two places is still one: its innermost unit is the same.
    if a[-1] is b[-1]:
        return a
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] is b[shared]:
        shared += 1
    return a[:shared]


def _choose(model: nn.Module, units: Any) -> dict[nn.Module, str]:
    """The modules that are units, with their names; the model itself is one without saying."""
    named = {module: name for name, module in reversed(list(model.named_modules())) if name}
    named = dict(reversed(list(named.items())))
    # A compiled module is entered through its wrapper, and hooks inside would be compiled.
    wrapped = {_compiled(m) for m in named}
    named = {m: name for m, name in named.items() if m not in wrapped}
    if units is None:
        return {m: named[m] for m in _repeated(model) if m in named}
    wanted = _test(units)
    found = {module: name for module, name in named.items() if wanted(name, module)}
    if not found:
        kinds = sorted({type(m).__name__ for m in named})
        raise ValueError(
            f"units={units!r} matches no module of the model; it has modules of the classes "
            f"{', '.join(kinds)}. Give a class, a tuple of classes, a predicate of a module, or "
            "modules; leave units out to take repeated blocks"
        )
    return found


def _compiled(module: nn.Module) -> nn.Module | None:
    """The module inside the wrapper that torch.compile() returns; None for other modules."""
    return dict(module.named_children()).get("_orig_mod")


def _test(units: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(units, type) or (
        isinstance(units, tuple) and units and all(isinstance(u, type) for u in units)
    ):
        return lambda name, module: isinstance(_compiled(module) or module, units)
    if isinstance(units, (list, tuple, set, nn.ModuleList)):
        members = set(units)
        for member in members:
            if not isinstance(member, nn.Module):
                raise TypeError(f"units must be modules of the model, got {member!r}")
        return lambda name, module: module in members
    if callable(units) and not isinstance(units, nn.Module):
        return lambda name, module: bool(units(module))
    raise TypeError(
        f"units must be a module class, a tuple of classes, a predicate of a module, or a list of "
        f"modules, got {units!r}"
    )


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Items of ModuleList and Sequential that share their class with another item.

    Inside such a block only blocks that have blocks of their own are looked for: a Sequential of
    two Linear layers inside a transformer's block is no unit.
    """
    found: dict[nn.Module, None] = {}
    for child in _containers(module):
        items = [m for m in child.children() if _has_params(m)]
        kinds = Counter(type(m) for m in items)
        blocks = [m for m in items if kinds[type(m)] > 1]
        for block in blocks:
            found[block] = None
            for inner in _repeated(block):
                if any(True for _ in inner.children()):
                    found[inner] = None
        for rest in items:
            if rest not in found:
                found.update(dict.fromkeys(_repeated(rest)))
    return list(found)


def _containers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost ModuleLists and Sequentials."""
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        yield module
        return
    for child in module.children():
        yield from _containers(child)


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def tensors_in(value: Any, found: list[torch.Tensor], seen: set[int] | None = None) -> None:
    """Collect the tensors with a graph behind them in whatever a module returns."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            found.append(value)
        return
    if value is None or isinstance(value, (str, bytes, int, float, bool, type, nn.Module)):
        return
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for item in value.values():
            tensors_in(item, found, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            tensors_in(item, found, seen)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            tensors_in(item, found, seen)
    slots = getattr(type(value), "__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        tensors_in(getattr(value, name, None), found, seen)
