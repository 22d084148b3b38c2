"""Stage 3: a unit's parameters are gathered before they are used, and freed after.

    forward   root  u0 ......... u1 ......... u2 .........
    gathered  root  u0           u1           u2
    on the way      u1 .....     u2 .....
    backward                                  u2 ......... u1 ......... u0 ......... root

A unit is resharded when the next one begins, so two units at most are gathered at a time: the one
that runs and the one that is prefetched. The last two of a forward pass stay for the backward pass,
which begins with them. The root is gathered from its forward pass to the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerohvd.communication.agreement import check_agreement
from zerohvd.communication.prefetch import Order
from zerohvd.communication.waiting import Waiting
from zerohvd.layout import Layout, build_layout
from zerohvd.torch import compat
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.params.owned import MakeMemory, NamedParam, set_units
from zerohvd.torch.stage3.planning import ModelPlan, UnitOptions, UnitPlan, tensors_in
from zerohvd.torch.stage3.storage import Fill, UnitFlats
from zerohvd.torch.stage3.unit import GATHERED, GATHERING, SHARDED, Unit, Use

_HOOKED = "_zerohvd_hooked"  # a tensor that tells its unit when its gradient comes


class Units:
    """All units of a model: which are gathered, and which is prefetched next."""

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
        self.options = options
        self.collectives = collectives
        self.prefix, self._fill = prefix, fill
        self._plan = plan
        _compare(plan, options, collectives)
        self.all = [Unit(u, number) for number, u in enumerate(plan.units)]
        self.root = self.all[0]
        self.waiting = Waiting(self.all, collectives, prefix)
        self._forward: Order[Unit] = Order()
        self._backward: Order[Unit] = Order()
        self._clock = 0
        self._task = False  # a backward pass runs, and `_end_backward` will be called
        self.loads = 0  # of the model's state
        self.hooks: list[Any] = []  # on the model's modules
        self.on_gather: Callable[[], None] | None = None

    # -- building ---------------------------------------------------------------------------------

    def divide(
        self, named: Sequence[NamedParam]
    ) -> Iterator[tuple[list[NamedParam], MakeMemory | None]]:
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
        """Split the root's parameters: those behind the last unit, and the others. Gradients of
        the first (a head) leave without waiting for those of the others (an embedding)."""
        params = list(self.root.module.parameters())
        inside = {p for plan in self._plan.units[1:] for _, p in plan.params}
        last = max((i for i, p in enumerate(params) if p in inside), default=-1)
        behind = set(params[last + 1 :])
        return [
            [n for n in members if n.param in behind],
            [n for n in members if n.param not in behind],
        ]

    def shard_rest(self, taken: Collection[nn.Parameter]) -> None:
        """Shard the parameters that no section has: frozen ones."""
        for unit, plan in self._planned():
            rest = [NamedParam(n, p) for n, p in plan.params if p not in taken]
            if rest:
                layout = build_layout([n.spec for n in rest], self.collectives.size)
                check_agreement(self.collectives, layout, {}, what="zero.zeroify")
                self._memory(unit)(layout, [n.param for n in rest])

    def take_out(self, params: Collection[nn.Parameter]) -> None:
        """Unshard these for good, of units' frozen parts: they are about to be trained."""
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
        """Unshard the whole model for good. Collective."""
        for unit in self.all:
            self.hold([unit])
            for part in unit.parts:
                part.dissolve()
            unit.parts = []
            unit.held, unit.state = 0, SHARDED
        for hooks in self.hooks:
            hooks.remove()
        self.hooks = []

    def _planned(self) -> Iterator[tuple[Unit, UnitPlan]]:
        return zip(self.all, self._plan.units, strict=True)

    def _memory(self, unit: Unit) -> MakeMemory:
        def make(layout: Layout, params: Sequence[nn.Parameter]) -> UnitFlats:
            prefix = f"{self.prefix}/u{unit.number}.{unit.made}"
            unit.made += 1
            flats = UnitFlats(
                layout, params, self.collectives.rank, self.collectives, prefix, self._fill
            )
            unit.parts.append(flats)
            for param in flats.params:
                set_units(param, self)
            return flats

        return make

    # -- forward ----------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> Use:
        """A module of the unit is about to run."""
        in_backward = compat.in_backward()
        if not in_backward:
            self._forget_backward()
        if unit is self.root and not unit.depth and not in_backward:
            self._forward.restart()
        # The backward pass begins with the last unit; the one before it comes next there.
        last = torch.is_grad_enabled() and not in_backward and self._forward.is_last(unit)
        if not last or self._idle((GATHERING,), unit):
            self._reshard_idle(unit)
        unit.depth += 1
        use = Use(self._tick())
        try:
            self._unshard(unit, self._backward if in_backward else self._forward)
        except BaseException:
            unit.depth -= 1
            raise
        return use

    def leave(self, unit: Unit, use: Use, outputs: Any) -> None:
        """The module has run, or has failed: then there are no outputs."""
        unit.depth -= 1
        use.stop = self._tick()
        found: list[torch.Tensor] = []
        if torch.is_grad_enabled():
            tensors_in(outputs, found)
            if outputs is not None:
                # A loss that a module keeps as an attribute starts a backward pass too.
                for module in unit.module.modules():
                    found += [
                        v for v in vars(module).values() if isinstance(v, torch.Tensor) and _new(v)
                    ]
            for tensor in found:
                if tensor.grad_fn is not None:
                    setattr(tensor, _HOOKED, True)
                    tensor.register_hook(_Before(self, unit, use))
        if unit is self.root and not unit.depth and not found and not compat.in_backward():
            self.reshard_idle()  # no backward pass will come this way

    def _unshard(self, unit: Unit, order: Order[Unit]) -> None:
        """Unshard the unit, and prefetch the one that came next in the pass before."""
        if self.on_gather is not None:
            self.on_gather()
        following = order.after(unit)
        with torch.inference_mode(False), torch.no_grad():
            unit.unshard_start()
            if following is not None and self._room_for(following, unit):
                following.unshard_start()
            unit.unshard_wait(self.waiting)

    def _room_for(self, following: Unit, unit: Unit) -> bool:
        """Whether there is no third one: two units at most are gathered or under way."""
        counted = (GATHERING, GATHERED) if self.options.reshard_after_forward else (GATHERING,)
        return not self._idle(counted, following, unit)

    def _reshard_idle(self, entered: Unit) -> None:
        if self.options.reshard_after_forward:
            for unit in self._idle((GATHERED,), entered):
                unit.reshard()

    def _idle(self, states: Collection[str], *but: Unit) -> list[Unit]:
        """Units in these states that nothing needs now, without the root and without `but`."""
        return [u for u in self.all[1:] if u.state in states and u.idle and u not in but]

    # -- backward ---------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, use: Use) -> None:
        """Gradients of the unit's outputs have come: its backward pass begins."""
        if unit.backward is use and unit.state == GATHERED:
            return
        if not self._task:
            self._task = True
            self._backward.restart()
            compat.after_backward(self._end_backward)
        again = torch.is_grad_enabled()  # create_graph=True: there will be a backward of this
        if unit is not self.root and not again:
            soon = self._backward.expected(unit, 2)  # the root may come in between
            for other in self.all[1:]:
                wanted = other in soon and other.backward is None
                if other is not unit and other.state == GATHERED and not wanted:
                    self._reshard_if_done(other, use)
        with torch.no_grad():
            unit.begin_backward(use)
        unit.kept = unit.kept or again
        self._unshard(unit, self._backward)

    def _reshard_if_done(self, unit: Unit, use: Use) -> None:
        """Autograd runs backwards in time: units that ran later than `use` are done."""
        done = unit.backward is not None and unit.backward.start > use.stop
        if done:
            unit.backward = None
        if unit.idle and (done or self.options.reshard_after_forward):
            unit.reshard()

    def _end_backward(self) -> None:
        self._forget_backward()
        self.reshard_idle()
        with torch.no_grad():
            self.waiting.meet()

    def _forget_backward(self) -> None:
        """Note that no backward pass is under way, also after one that has failed."""
        if self._task:
            self._task = False
            for unit in self.all:
                unit.backward = None

    # -- all of them ------------------------------------------------------------------------------

    def reshard_idle(self) -> None:
        """Reshard every unit that nothing needs now."""
        for unit in self.all:
            if unit.state == GATHERED and unit.idle:
                unit.reshard()

    def settle(self) -> None:
        """End a step: reshard everything, and leave no allgather under way on any rank.

        A rank may have prefetched a unit that it did not use, and the others not at all. They take
        part now: the first gather of the next step would else meet it, and get old values.
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
                unit.unshard_wait(self.waiting)
                unit.reshard()

    def of(self, params: Iterable[nn.Parameter]) -> list[Unit]:
        """The units that hold any of these parameters, in order."""
        wanted = set(params)
        return [u for u in self.all if not wanted.isdisjoint(u.params)]

    def hold(self, units: Sequence[Unit]) -> None:
        """Unshard these, and keep them gathered until `let_go`."""
        with torch.inference_mode(False), torch.no_grad():
            for unit in units:
                unit.unshard_start()
            for unit in units:
                unit.unshard_wait(self.waiting)
        for unit in units:
            unit.held += 1

    def let_go(self, units: Sequence[Unit]) -> None:
        """Undo `hold`: reshard those that nothing else needs."""
        for unit in units:
            unit.held -= 1
            if unit.idle and unit.state == GATHERED:
                unit.reshard()

    def lend(self, units: Sequence[Unit]) -> None:
        """Hold these for user code, which may keep views of the parameters."""
        self.hold(units)
        with torch.inference_mode(False), torch.no_grad():
            for unit in units:
                unit.lend()

    def end_loan(self, units: Sequence[Unit]) -> None:
        """Undo `lend`."""
        self.let_go(units)
        with torch.inference_mode(False), torch.no_grad():
            for unit in units:
                unit.end_loan()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _compare(
    plan: ModelPlan, options: UnitOptions, collectives: TorchCollectives | LocalCollectives
) -> None:
    """Compare the plans of all ranks: ranks with other units would deadlock."""
    settings = {
        "persist_below": options.persist_below,
        "reshard_after_forward": options.reshard_after_forward,
    }
    layout = build_layout(plan.specs(), collectives.size)
    check_agreement(collectives, layout, settings, what="zero.zeroify")


class _Before:
    """Hook on an output tensor: calls `before_backward` when its gradient comes."""

    def __init__(self, units: Units, unit: Unit, use: Use) -> None:
        self._units, self._unit, self._use = units, unit, use

    def __call__(self, _: torch.Tensor) -> None:
        self._units.before_backward(self._unit, self._use)


def _new(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a graph, and no hook of a unit yet."""
    return tensor.grad_fn is not None and not getattr(tensor, _HOOKED, False)
