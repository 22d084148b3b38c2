"""The units of a torch model: built of its modules, driven by its forward and backward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerohvd.communication.agreement import check_agreement, loaded_by_first_alone
from zerohvd.compression.codecs import Codec
from zerohvd.layout import Layout, build_layout
from zerohvd.peers.group import Peers
from zerohvd.peers.star import StarCollectives
from zerohvd.stage3.lifecycle import UnitLifecycle
from zerohvd.stage3.planning import ModelPlan, UnitOptions, UnitPlan
from zerohvd.stage3.unit import Unit, Use
from zerohvd.torch import compat
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.communication.star import TorchStar
from zerohvd.torch.params.owned import MakeMemory, NamedParam, set_units
from zerohvd.torch.stage3 import placeholder
from zerohvd.torch.stage3.storage import Fill, UnitFlats

_HOOKED = "_zerohvd_hooked"  # a tensor that tells its unit when its gradient comes


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Inside, the user's modes are off: another rank may be training while this one infers."""
    with compat.outside_of_transforms(), torch.inference_mode(False), torch.no_grad():
        yield


class ModuleUnit(Unit[UnitFlats]):
    """A unit that is a module."""

    def __init__(self, plan: UnitPlan, number: int) -> None:
        super().__init__(plan.name, number, _plain_tensors)
        self.module: nn.Module = plan.module
        self.modules: list[nn.Module] = list(dict.fromkeys([plan.module, *plan.owners]))
        self.running: list[tuple[nn.Module, Use | None]] = []  # innermost last
        self.made = 0  # parts, ever: each has names of its own for its collectives

    def any_view(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether one of these lies in the memory that is freed when the unit is resharded."""
        return any(part.is_view(tensor) for part in self.parts for tensor in tensors)


class Units(UnitLifecycle[ModuleUnit]):
    """All units of a model, with their memory."""

    _collectives: TorchCollectives | LocalCollectives

    def __init__(
        self,
        plan: ModelPlan,
        options: UnitOptions,
        fill: Fill,
        collectives: TorchCollectives | LocalCollectives,
        prefix: str,
    ) -> None:
        """
        Args:
            fill: Writes a parameter's first values, as for `UnitFlats`.
        """
        plan.check(options, collectives)
        super().__init__(
            [ModuleUnit(u, number) for number, u in enumerate(plan.units)],
            collectives,
            prefix,
            reshard_after_forward=options.reshard_after_forward,
            guard=_plain_tensors,
        )
        self.hooks: list[Any] = []  # on the model's modules
        self.peers: Peers | None = None  # the other ranks, if one alone may ask them
        # On the first rank: what was loaded, until all ranks are known to have it.
        self.loaded: dict[nn.Parameter, torch.Tensor] = {}
        self.codec: Codec | None = None  # packs parameters on their way; None: nothing does
        self._plan, self._fill = plan, fill

    # -- building ---------------------------------------------------------------------------------

    def divide(
        self, named: Sequence[NamedParam]
    ) -> Iterator[tuple[list[NamedParam], MakeMemory | None]]:
        """Sections for these parameters, in the order in which backward passes complete them."""
        by_param = {n.param: n for n in named}
        for number, params in self._plan.divide(list(by_param)):
            memory = None if number is None else self._memory(self.all[number])
            yield [by_param[p] for p in params], memory

    def shard_rest(self, taken: Collection[nn.Parameter]) -> None:
        """Shard the parameters that no section has: frozen ones."""
        for unit, plan in zip(self.all, self._plan.units, strict=True):
            rest = [NamedParam(p.spec.name, p.param) for p in plan.params if p.param not in taken]
            if rest:
                layout = build_layout([n.spec for n in rest], self._collectives.size)
                check_agreement(self._collectives, layout, {}, what="zero.zeroify")
                self._memory(unit)(layout, [n.param for n in rest])

    def take_out(self, params: Collection[nn.Parameter]) -> None:
        """Unshard these for good, of units' frozen parts: they are about to be trained."""
        for unit in self.of(params):
            mixed = [part for part in unit.parts if not set(part.params).isdisjoint(params)]
            rest = [p for part in mixed for p in part.params if p not in params]
            self._dissolve(unit, mixed)
            if rest:
                self.shard_rest({p for u in self.all for p in u.params} | set(params))

    def dissolve(self) -> None:
        """Unshard the whole model for good. Collective."""
        for unit in self.all:
            self._dissolve(unit, unit.parts)
        for hooks in self.hooks:
            hooks.remove()
        self.hooks = []

    def _dissolve(self, unit: ModuleUnit, parts: Sequence[UnitFlats]) -> None:
        self.hold([unit])
        for part in parts:
            part.dissolve()
        unit.parts = [part for part in unit.parts if part not in parts]
        self.let_go([unit])

    def _memory(self, unit: ModuleUnit) -> MakeMemory:
        def make(layout: Layout, params: Sequence[nn.Parameter]) -> UnitFlats:
            prefix = f"{self.prefix}/u{unit.number}.{unit.made}"
            unit.made += 1
            flats = UnitFlats(
                layout,
                params,
                self._collectives.rank,
                self._collectives,
                prefix,
                self._fill,
                self.codec,
            )
            unit.parts.append(flats)
            for param in flats.params:
                set_units(param, self)
            return flats

        return make

    # -- values for one rank alone ----------------------------------------------------------------

    def give(self, star: StarCollectives, numbers: Sequence[int]) -> None:
        """Give another rank this one's shards of these units, when it asks for them."""
        for part in (part for number in numbers for part in self.all[number].parts):
            part.collect(TorchStar(star), star.root)

    def take(self, params: Collection[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Copies of these parameters, without the other ranks' main threads."""
        assert self.peers is not None
        units = self.of(params)
        found: dict[nn.Parameter, torch.Tensor] = {}
        wanted = [unit.number for unit in units]
        with self.peers.take("model", "model.state_dict()", wanted) as star:
            for part in (part for unit in units for part in unit.parts):
                values = part.collect(TorchStar(star), star.root)
                found.update((p, v.clone()) for p, v in values.items() if p in params)
        return found

    # -- values that the first rank alone has loaded ----------------------------------------------

    def keep_for_others(self, loaded: Mapping[nn.Parameter, torch.Tensor]) -> None:
        if self._collectives.rank == 0 and self._collectives.size > 1:
            self.loaded.update(loaded)

    def share_loaded(self) -> None:
        """Give all ranks what the first one alone has loaded into the model. Collective.

        `hvd.broadcast_parameters(model.state_dict())` begins with it. A step without it raises.
        """
        numbers = [unit.number for unit in self.of(self.loaded)]
        found = loaded_by_first_alone(
            self._collectives, self.loads, numbers, name=f"{self.prefix}/loads"
        )
        if found is not None:
            first, wanted = found
            for unit in (self.all[number] for number in wanted):
                self.hold([unit])
                with torch.no_grad():
                    for param in set(unit.params) & set(self.loaded):
                        param.copy_(self.loaded[param])
                self.publish([unit], 0)
                self.let_go([unit])
            self.loads = first
        self.loaded = {}

    # -- passes -----------------------------------------------------------------------------------

    def enter(self, unit: ModuleUnit) -> Use:
        """A module of the unit is about to run."""
        if compat.in_transform():
            _refuse_transformed(unit)
        return self.begin_forward(
            unit, recomputed=compat.in_backward(), recorded=torch.is_grad_enabled()
        )

    def leave(self, unit: ModuleUnit, use: Use, outputs: Any) -> None:
        """The module has run, or has failed: then there are no outputs."""
        recorded = compat.in_backward()
        escaping: list[ModuleUnit] = []
        try:
            found: list[torch.Tensor] = []
            _find_tensors(outputs, found, set())
            escaping = [u for u in (unit, *use.borrowed) if u.any_view(found)]
            if torch.is_grad_enabled() and outputs is not None:
                found = [tensor for tensor in found if tensor.requires_grad]
                recorded = self._hook_outputs(unit, use, found) or recorded
        finally:
            self.end_forward(unit, use, last_use=not recorded, escaping=escaping)
        for other in escaping:
            if other.idle and (other is not self.root or not recorded):
                raise _escaped(unit, other)

    def borrow_for(self, param: nn.Parameter) -> bool:
        """Gather a parameter that the pass which runs now uses itself; False: there is none."""
        recomputed = compat.in_backward()
        if recomputed and self.starts_backward():
            compat.after_backward(self.end_backward)
        recorded = torch.is_grad_enabled()
        return all(
            self.borrow(unit, recomputed=recomputed, recorded=recorded)
            for unit in self.of([param])
        )

    def _hook_outputs(self, unit: ModuleUnit, use: Use, found: list[torch.Tensor]) -> bool:
        """Let outputs tell when their gradients come; return whether any has a gradient."""
        # A loss that a module keeps as an attribute starts a backward pass too.
        for module in unit.module.modules():
            found += [v for v in vars(module).values() if _is_new(v)]
        for tensor in found:
            if tensor.grad_fn is not None:
                setattr(tensor, _HOOKED, True)
                tensor.register_hook(_BeforeBackward(self, unit, use))
        return bool(found)

    def before_backward(self, unit: ModuleUnit, use: Use) -> None:
        """Gradients of the unit's outputs have come: its backward pass begins."""
        if self.starts_backward():
            compat.after_backward(self.end_backward)
        # With create_graph=True there will be a backward pass of this one.
        self.begin_backward(unit, use, again=torch.is_grad_enabled())


class _BeforeBackward:
    """Hook on an output tensor: calls `before_backward` when its gradient comes."""

    def __init__(self, units: Units, unit: ModuleUnit, use: Use) -> None:
        self._units, self._unit, self._use = units, unit, use

    def __call__(self, _: torch.Tensor) -> None:
        self._units.before_backward(self._unit, self._use)


def _refuse_transformed(unit: ModuleUnit) -> None:
    """Raise if torch.func was given placeholders to differentiate or to batch."""
    for module in unit.module.modules():
        for param in module.parameters(recurse=False):
            inner = compat.untransformed(param)
            if inner is not param and placeholder.is_placeholder(inner):
                raise placeholder.refusal(inner, "torch.func")


def _escaped(unit: ModuleUnit, other: ModuleUnit) -> RuntimeError:
    names = ", ".join(part.layout.params[0].name for part in other.parts)
    return RuntimeError(
        f"the module {unit.name!r} returns a view of its parameters ({names}, or one beside it), "
        "whose memory is freed now that nothing around the module runs. Return a copy: .clone()"
    )


def _is_new(value: Any) -> bool:
    """Whether a value is a tensor that has a graph, and no hook of a unit yet."""
    return (
        isinstance(value, torch.Tensor)
        and value.grad_fn is not None
        and not getattr(value, _HOOKED, False)
    )


def _find_tensors(value: Any, found: list[torch.Tensor], seen: set[int]) -> None:
    """Collect the tensors in whatever a module returns."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    if value is None or isinstance(value, (str, bytes, int, float, bool, type, nn.Module)):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, dict):
        inside += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside += value
    elif hasattr(value, "__dict__"):
        inside += vars(value).values()
    slots = getattr(type(value), "__slots__", ())
    inside += [getattr(value, s, None) for s in ((slots,) if isinstance(slots, str) else slots)]
    for item in inside:
        _find_tensors(item, found, seen)
