"""Which parameters are gathered together: the units of a model.

An adapter describes its model as a tree of `Node`s, and gets back which of its modules (layers) are
units, with the parameters of each.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from zerohvd.communication.agreement import check_agreement
from zerohvd.communication.collectives import Collectives
from zerohvd.layout import ParamSpec, build_layout

ROOT = "(root)"
PERSIST_BELOW = 256


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


class PlannedParam(NamedTuple):
    """A parameter in its place."""

    spec: ParamSpec  # its name is that in the model
    param: Any  # hashable, equal to itself alone: tied parameters are found by identity


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A module of a model at one of its places in the tree. A shared module has several nodes.

    Args:
        name: Its path from the model; "" is the model itself.
        module: The module: hashable, equal to itself alone.
        kind: Its class, as far as `units=` is concerned: of a wrapper, that of what is inside.
        params: Those of its own, without its children's.
        is_container: A list of modules, whose items may be repeated blocks.
        can_be_unit: False for what is only entered through its parent.
    """

    name: str
    module: Any
    kind: type
    children: tuple[Node, ...] = ()
    params: tuple[PlannedParam, ...] = ()
    is_container: bool = False
    can_be_unit: bool = True

    def walk(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def has_params(self) -> bool:
        return any(node.params for node in self.walk())


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """A unit before it has memory."""

    name: str
    module: Any
    params: tuple[PlannedParam, ...]
    owners: tuple[Any, ...]  # modules that hold these parameters themselves


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """All parameters of a model, each in one place."""

    units: tuple[UnitPlan, ...]  # in model order; the root is the first
    persistent: tuple[PlannedParam, ...]
    order: tuple[Hashable, ...]  # all parameters, in model order

    def check(self, options: UnitOptions, collectives: Collectives) -> None:
        """Compare the plans of all ranks: ranks with other units would deadlock. Collective."""
        homes = [(u.name, u.params) for u in self.units] + [("(persistent)", self.persistent)]
        specs = [dataclasses.replace(p.spec, group=unit) for unit, params in homes for p in params]
        settings = {
            "persist_below": options.persist_below,
            "reshard_after_forward": options.reshard_after_forward,
        }
        layout = build_layout(specs, collectives.size)
        check_agreement(collectives, layout, settings, what="zero.zeroify")

    def divide(self, params: Sequence[Any]) -> Iterator[tuple[int | None, list[Any]]]:
        """Divide these parameters into what is sharded together.

        Yields:
            A unit's number, None for parameters that stay gathered, and those of `params` in it,
            in the order in which backward passes complete them.
        """
        home = {p.param: number for number, u in enumerate(self.units) for p in u.params}
        for number in [*reversed(range(1, len(self.units))), 0]:
            members = [p for p in params if home.get(p) == number]
            for part in [members] if number else self._split_root(members, home):
                if part:
                    yield number, part
        persistent = [p for p in params if p not in home]
        if persistent:
            yield None, persistent

    def _split_root(
        self, members: Sequence[Any], home: dict[Hashable, int]
    ) -> tuple[list[Any], list[Any]]:
        """Split the root's parameters: those behind the last unit, and the others. Gradients of
        the first (a head) leave without waiting for those of the others (an embedding)."""
        last = max((i for i, p in enumerate(self.order) if home.get(p, 0)), default=-1)
        behind = set(self.order[last + 1 :])
        return [p for p in members if p in behind], [p for p in members if p not in behind]


def _stays(spec: ParamSpec, options: UnitOptions) -> bool:
    """Whether a parameter stays gathered: a small one, or one that can have no gradient."""
    return spec.numel < options.persist_below or "float" not in spec.dtype


def plan_units(
    model: Node, options: UnitOptions, *, base: type = object, noun: str = "module"
) -> ModelPlan:
    """Put every parameter into the nearest unit that all modules which use it lie in.

    A tied parameter, found in several units by identity, goes to their common ancestor.

    Args:
        base: The class of all modules.
        noun: What the framework calls a module.
    """
    chosen = _choose(model, options.units, base, noun)
    home, found = _homes(model, chosen)
    small = {p for p, planned in found.items() if _stays(planned.spec, options)}
    units = []
    for module, node in {model.module: model, **chosen}.items():
        params = [p for p, unit in home.items() if unit is module and p not in small]
        if params or node is model:
            held = set(params)
            inside = node.walk()
            owners = {n.module: None for n in inside if any(p.param in held for p in n.params)}
            name = ROOT if node is model else node.name
            units.append(UnitPlan(name, module, tuple(found[p] for p in params), tuple(owners)))
    persistent = tuple(planned for p, planned in found.items() if p in small)
    return ModelPlan(tuple(units), persistent, tuple(found))


def _homes(
    model: Node, chosen: dict[Any, Node]
) -> tuple[dict[Hashable, Any], dict[Hashable, PlannedParam]]:
    """For every parameter its unit's module, and the parameter under its first name."""
    chains: dict[Hashable, tuple[Any, ...]] = {}
    found: dict[Hashable, PlannedParam] = {}
    for node, chain in _with_units(model, (model.module,), chosen):
        for planned in node.params:
            found.setdefault(planned.param, planned)
            known = chains.get(planned.param)
            chains[planned.param] = chain if known is None else _common(known, chain)
    return {p: chain[-1] for p, chain in chains.items()}, found


def _with_units(
    node: Node, chain: tuple[Any, ...], chosen: dict[Any, Node]
) -> Iterator[tuple[Node, tuple[Any, ...]]]:
    """Every node with the units around it, outermost first."""
    yield node, chain
    for child in node.children:
        enters = child.module in chosen and child.module not in chain
        yield from _with_units(child, (*chain, child.module) if enters else chain, chosen)


def _common(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    # One unit used in two places is still one: its innermost unit is the same.
    if a[-1] is b[-1]:
        return a
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] is b[shared]:
        shared += 1
    return a[:shared]


def _choose(model: Node, units: Any, base: type, noun: str) -> dict[Any, Node]:
    """The modules that are units, under their first names; the model is one without saying."""
    named: dict[Any, Node] = {}
    for node in model.walk():
        if node is not model and node.can_be_unit:
            named.setdefault(node.module, node)
    if units is None:
        blocks = [node.module for node in _repeated(model)]
        return {m: named[m] for m in blocks if m in named}
    wanted = _test(units, base, noun)
    found = {module: node for module, node in named.items() if wanted(node)}
    if not found:
        kinds = sorted({type(m).__name__ for m in named})
        raise ValueError(
            f"units={units!r} matches no {noun} of the model; it has {noun}s of the classes "
            f"{', '.join(kinds)}. Give a class, a tuple of classes, a predicate of a {noun}, or "
            f"{noun}s; leave units out to take repeated blocks"
        )
    return found


def _test(units: Any, base: type, noun: str) -> Callable[[Node], bool]:
    if isinstance(units, type) or (
        isinstance(units, tuple) and units and all(isinstance(u, type) for u in units)
    ):
        return lambda node: issubclass(node.kind, units)
    if isinstance(units, (list, tuple, set)):
        for member in units:
            if not isinstance(member, base):
                raise TypeError(f"units must be {noun}s of the model, got {member!r}")
        members = set(units)
        return lambda node: node.module in members
    if callable(units) and not isinstance(units, base):
        return lambda node: bool(units(node.module))
    raise TypeError(
        f"units must be a {noun} class, a tuple of classes, a predicate of a {noun}, or a list of "
        f"{noun}s, got {units!r}"
    )


def _repeated(node: Node) -> list[Node]:
    """Items of containers that share their class with another item.

    Inside such a block only blocks that have blocks of their own are looked for: a container of
    two linear layers inside a transformer's block is no unit.
    """
    found: dict[Any, Node] = {}
    for container in _containers(node):
        items = [item for item in container.children if item.has_params]
        kinds = Counter(type(item.module) for item in items)
        for item in items:
            if kinds[type(item.module)] > 1:
                found.setdefault(item.module, item)
                for inner in _repeated(item):
                    if inner.children:
                        found.setdefault(inner.module, inner)
        for item in items:
            if item.module not in found:
                for inner in _repeated(item):
                    found.setdefault(inner.module, inner)
    return list(found.values())


def _containers(node: Node) -> Iterator[Node]:
    """The outermost containers."""
    if node.is_container:
        yield node
        return
    for child in node.children:
        yield from _containers(child)
