"""Stage 3: a unit's parameters are gathered before they are used, and freed after.

    forward   root  u0 ......... u1 ......... u2 .........
    gathered  root  u0           u1           u2
    on the way      u1 .....     u2 .....
    backward                                  u2 ......... u1 ......... u0 ......... root

A unit is freed when the next one is entered, so two units at most are whole at a time: the one at
work and the one that is being gathered ahead. The last two of a forward pass wait for the backward
pass, which begins with them. The root is whole from its forward pass to where the backward pass no
longer needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerohvd.communication.agreement import check_agreement
from zerohvd.communication.prefetch import Order
from zerohvd.layout import Layout, build_layout
from zerohvd.torch import heap
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.pages import POOL, is_counted
from zerohvd.torch.params.section import Memory, NamedParam, Owner
from zerohvd.torch.shard_memory import ShardMemory
from zerohvd.torch.stage3.planning import ModelPlan, UnitOptions, UnitPlan, tensors_in
from zerohvd.torch.stage3.storage import Fill, UnitFlats
from zerohvd.torch.stage3.unit import COMING, SHARDED, WHOLE, Unit, Use
from zerohvd.torch.stage3.waiting import Waiting

# Steps until the heap looks as it will for ever. The optimizer's state comes with the first one,
# between what that leaves; gaps that no later step needs do not have to keep their memory.
_FIRST_STEPS = 3

# Bytes that may be idle in a forward pass, for gradients to come: much less than a model of the
# size that needs this stage, and clearing them anew in each step can take a few per cent of it.
_SPARE = 32 << 20


class Units:
    """All units of a model: who is whole, who comes next."""

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
        if is_counted():
            heap.map_large()
        self.options = options
        self.collectives = collectives
        self.prefix, self._fill = prefix, fill
        self._plan = plan
        _compare(plan, options, collectives)
        self.all = [Unit(u, number) for number, u in enumerate(plan.units)]
        self.root = self.all[0]
        self._unit_of: dict[nn.Parameter, Unit] = {}
        self.waiting = Waiting(self.all, collectives, prefix)
        self._forward, self._backward = Order(), Order()
        self._clock = 0
        self._task = False  # the end of a backward pass has been asked for
        self._steps = 0
        self._recomputes = False  # a module has been run inside of a backward pass
        self.loads = 0  # of the model's state
        self.hooks: list[Any] = []  # on the model's modules
        self.on_gather: Callable[[], None] | None = None
        self.gradients: list[ShardMemory] = []  # which take the place of what is freed

    # -- building ---------------------------------------------------------------------------------

    def divide(
        self, named: Sequence[NamedParam]
    ) -> Iterator[tuple[list[NamedParam], Memory | None]]:
        """Sections for these parameters, in the order in which backward passes complete them."""
        of = {p: unit for unit, plan in self._planned() for _, p in plan.params}
        for unit in [*reversed(self.all[1:]), self.root]:
            members = [n for n in named if of.get(n.param) is unit]
            for part in self._ends(members) if unit is self.root else [members]:
                if part:
                    yield part, self._memory(unit)
        small = [n for n in named if n.param not in of]
        if small:
            yield small, None

    def _ends(self, members: Sequence[NamedParam]) -> list[list[NamedParam]]:
        """The root's, apart: what the model has behind its units, and the others. Gradients of the
        first, of a head, should not have to wait for those of the others, of an embedding."""
        params = list(self.root.module.parameters())
        inside = {p for plan in self._plan.units[1:] for _, p in plan.params}
        last = max((i for i, p in enumerate(params) if p in inside), default=-1)
        behind = set(params[last + 1 :])
        return [
            [n for n in members if n.param in behind],
            [n for n in members if n.param not in behind],
        ]

    def shard_rest(self, taken: Collection[nn.Parameter]) -> None:
        """Shard what no section has taken: frozen parameters."""
        for unit, plan in self._planned():
            rest = [NamedParam(n, p) for n, p in plan.params if p not in taken]
            if rest:
                layout = build_layout([n.spec for n in rest], self.collectives.size)
                check_agreement(self.collectives, layout, {}, what="zero.zeroify")
                self._memory(unit)(layout, [n.param for n in rest])

    def take_out(self, params: Collection[nn.Parameter]) -> None:
        """Make these whole again, of units' frozen parts: they are about to be trained."""
        for unit in self.of(params):
            self.hold([unit])
            mixed = [part for part in unit.parts if not set(part.params).isdisjoint(params)]
            for part in mixed:
                part.dissolve()
            unit.parts = [part for part in unit.parts if part not in mixed]
            self.let_go([unit])
            rest = [p for part in mixed for p in part.params if p not in params]
            taken = {p for u in self.all for p in u.params} | set(params)
            if rest:
                self.shard_rest(taken)

    def dissolve(self) -> None:
        """Make the whole model whole again, and let go of it. All ranks must do it."""
        for unit in self.all:
            self.hold([unit])
            for part in unit.parts:
                part.dissolve()
            unit.parts = []
            unit.held, unit.state = 0, SHARDED
        self._unit_of = {}
        for hooks in self.hooks:
            hooks.remove()
        self.hooks = []

    def _planned(self) -> Iterator[tuple[Unit, UnitPlan]]:
        return zip(self.all, self._plan.units, strict=True)

    def _memory(self, unit: Unit) -> Memory:
        def make(layout: Layout, params: Sequence[nn.Parameter]) -> UnitFlats:
            prefix = f"{self.prefix}/u{unit.number}.{unit.made}"
            unit.made += 1
            flats = UnitFlats(
                layout, params, self.collectives.rank, self.collectives, prefix, self._fill
            )
            unit.parts.append(flats)
            for param in flats.params:
                param._zerohvd_units = Owner(self)
                self._unit_of[param] = unit
            return flats

        return make

    # -- forward ----------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> Use:
        """A module of the unit is about to run."""
        in_backward = _in_backward()
        self._recomputes = self._recomputes or in_backward
        if not in_backward:
            self._forget_backward()
        if unit is self.root and not unit.depth and not in_backward:
            self._forward.restart()
        # The backward pass begins with the last unit; the one before it comes next there.
        last = torch.is_grad_enabled() and not in_backward and self._forward.is_last(unit)
        if not last or self._idle((COMING,), unit):
            self._free_idle(unit)
        unit.depth += 1
        use = Use(self._tick())
        try:
            self._have(unit, self._backward if in_backward else self._forward)
        except BaseException:
            unit.depth -= 1
            raise
        if unit is not self.root and not in_backward:
            # From here on each unit has the pages of the one before.
            POOL.trim(keep=0 if is_counted() else _SPARE)
        return use

    def leave(self, unit: Unit, use: Use, outputs: Any) -> None:
        """The module has run, or has failed: then there are no outputs."""
        unit.depth -= 1
        use.stop = self._tick()
        found: list[torch.Tensor] = []
        if torch.is_grad_enabled():
            tensors_in(outputs, found)
            if outputs is not None:
                # Losses that a module leaves lying about are backward passes' beginnings too.
                for module in unit.module.modules():
                    found += [
                        v for v in vars(module).values() if isinstance(v, torch.Tensor) and _new(v)
                    ]
            for tensor in found:
                if tensor.grad_fn is not None:
                    tensor._zerohvd_hooked = True
                    tensor.register_hook(_Before(self, unit, use))
        if unit is self.root and not unit.depth and not found and not _in_backward():
            self.free_idle()  # no backward pass will come this way

    def _have(self, unit: Unit, order: Order) -> None:
        """Gather the unit, and start with the one that came next the last time."""
        if self.on_gather is not None:
            self.on_gather()
        following = order.after(unit)
        with torch.inference_mode(False), torch.no_grad():
            unit.start()
            if following is not None and self._room_for(following, unit):
                following.start()
            unit.finish(self.waiting)

    def _room_for(self, following: Unit, unit: Unit) -> bool:
        """Whether there is no third one: two units at most are whole or to become so."""
        counted = (COMING, WHOLE) if self.options.reshard_after_forward else (COMING,)
        return not self._idle(counted, following, unit)

    def _free_idle(self, entered: Unit) -> None:
        if self.options.reshard_after_forward:
            for unit in self._idle((WHOLE,), entered):
                unit.free()

    def _idle(self, states: Collection[str], *but: Unit) -> list[Unit]:
        """The units in these states that nothing needs now, without the root and without `but`."""
        return [u for u in self.all[1:] if u.state in states and u.idle and u not in but]

    # -- backward ---------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, use: Use) -> None:
        """Gradients of the unit's outputs have come: its backward pass begins."""
        if unit.backward is use and unit.state == WHOLE:
            return
        if not self._task:
            self._task = True
            self._backward.restart()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        again = torch.is_grad_enabled()  # create_graph=True: there will be a backward of this
        if unit is not self.root and not again:
            soon = self._backward.expected(unit, 2)  # the root may come in between
            for other in self.all[1:]:
                wanted = other in soon and other.backward is None
                if other is not unit and other.state == WHOLE and not wanted:
                    self._free_if_done(other, use)
            if self._free_early(self.root):
                self._trim_to_gradients()  # the units that come now have pages of their own
        unit.backward = use
        unit.awaited = {p for p in unit.params if p.requires_grad}
        unit.kept = unit.kept or again
        self._have(unit, self._backward)

    def _free_if_done(self, unit: Unit, use: Use) -> None:
        """Autograd goes back in time: units that ran later than `use` are through."""
        through = unit.backward is not None and unit.backward.start > use.stop
        if through:
            unit.backward = None
        if unit.idle and (through or self.options.reshard_after_forward):
            unit.free()

    def after_gradient(self, param: nn.Parameter) -> None:
        """A gradient has come. With the last one of a unit, its backward pass is over."""
        unit = self._unit_of.get(param)
        if unit is None or unit is self.root or unit.backward is None:
            return
        unit.awaited.discard(param)
        if unit.awaited or not self._free_early(unit):
            return
        if all(u.state == SHARDED for u in self.all[1:]):
            # What comes now is the root's, whose gradients may be the largest of all.
            self._trim_to_gradients()

    def _trim_to_gradients(self) -> None:
        POOL.trim(keep=sum(memory.missing for memory in self.gradients))

    def _free_early(self, unit: Unit) -> bool:
        # What is recomputed may need any parameter again, and nothing refers to it before.
        if self._recomputes or not self.options.reshard_after_forward:
            return False
        return unit.free_if_through()

    def _end_backward(self) -> None:
        self._forget_backward()
        self.free_idle()
        with torch.no_grad():
            self.waiting.meet()

    def _forget_backward(self) -> None:
        """No backward pass is under way: also after one that has failed."""
        if self._task:
            self._task = False
            for unit in self.all:
                unit.backward = None

    # -- all of them ------------------------------------------------------------------------------

    def free_idle(self) -> None:
        for unit in self.all:
            if unit.state == WHOLE and unit.idle:
                unit.free()
        POOL.trim()

    def settle(self) -> None:
        """End of a step: nothing is under way and nothing is whole, on any rank.

        A rank may have gathered ahead what it then did not use, and the others not at all: they
        do it now, or it would be met by the first gather of the next step, with old values.
        """
        self._forget_backward()
        for unit in self.all:
            unit.kept = False
            if unit.depth or unit.held:
                raise RuntimeError(
                    f"step() was called while the parameters of {unit.name!r} were in use: leave "
                    "the module's forward pass, or `with zero.gathered(...)`, before"
                )
        with torch.no_grad():
            self.waiting.even_out()
            for unit in self.all:
                unit.finish(self.waiting)
                unit.free()
        POOL.trim()
        self._steps += 1
        if self._steps <= _FIRST_STEPS:
            heap.give_back()

    def rest(self) -> None:
        """After the step: gradients that were still on their way have left pages behind."""
        POOL.trim()

    def of(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        """The units that hold any of these parameters, in order."""
        wanted = set(params)
        return [u for u in self.all if not wanted.isdisjoint(u.params)]

    def hold(self, units: Sequence[Unit]) -> None:
        """Gather these for as long as they are held."""
        with torch.inference_mode(False), torch.no_grad():
            for unit in units:
                unit.start()
            for unit in units:
                unit.finish(self.waiting)
        for unit in units:
            unit.held += 1

    def let_go(self, units: Sequence[Unit]) -> None:
        for unit in units:
            unit.held -= 1
            if unit.idle and unit.state == WHOLE:
                unit.free()
        POOL.trim()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _compare(
    plan: ModelPlan, options: UnitOptions, collectives: TorchCollectives | LocalCollectives
) -> None:
    """Before anything is made of it: ranks with other units would wait for each other."""
    settings = {
        "persist_below": options.persist_below,
        "reshard_after_forward": options.reshard_after_forward,
    }
    layout = build_layout(plan.specs(), collectives.size)
    check_agreement(collectives, layout, settings, what="zero.zeroify")


class _Before:
    """Hook on an output: a unit's backward pass begins."""

    def __init__(self, units: Units, unit: Unit, use: Use) -> None:
        self._units, self._unit, self._use = units, unit, use

    def __call__(self, _: torch.Tensor) -> None:
        self._units.before_backward(self._unit, self._use)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _new(tensor: torch.Tensor) -> bool:
    """Whether it has a graph behind it that no unit has seen yet."""
    return tensor.grad_fn is not None and not getattr(tensor, "_zerohvd_hooked", False)
