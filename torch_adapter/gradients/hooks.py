"""Hooks on parameters and on modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from zerohvd.torch.stage3.unit import Unit
    from zerohvd.torch.stage3.units import Units


class GradHooks:
    """Calls `owner._arrived(section, index)` when `params[index].grad` has been added to.

    The hooks live as long as the parameters, so they must not keep the owner alive.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], owner: Any, section: int) -> None:
        self._owner = weakref.ref(owner)
        self._section = section
        self._handles = [
            param.register_post_accumulate_grad_hook(self._make(index))
            for index, param in enumerate(params)
        ]

    def _make(self, index: int) -> Callable[[torch.Tensor], None]:
        owner, section = self._owner, self._section

        def hook(_: torch.Tensor) -> None:
            living = owner()
            if living is not None:
                # A backward pass with create_graph=True runs hooks with gradients switched on.
                with torch.no_grad():
                    living.arrived(section, index)

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class UnitHooks:
    """Tells `units` when a unit's module runs, or a module inside it that is called on its own.

    The hooks live as long as the model, and so does `units`: the model cannot run without it.
    """

    def __init__(self, units: Units) -> None:
        # A compiler must not look into these; around them it may compile what it likes.
        self._enter = torch.compiler.disable(units.enter)
        self._leave = torch.compiler.disable(units.leave)
        self._handles: list[Any] = []
        for unit in units.all:
            for module in dict.fromkeys([unit.module, *unit.owners]):
                inner = module is not unit.module
                self._handles += [
                    module.register_forward_pre_hook(self._before(unit, inner), prepend=True),
                    module.register_forward_hook(self._after(unit, inner), always_call=True),
                ]

    def _before(self, unit: Unit, inner: bool) -> Callable[[torch.nn.Module, Any], None]:
        enter = self._enter

        def hook(module: torch.nn.Module, _: Any) -> None:
            if inner and (torch.compiler.is_compiling() or unit.depth):
                return
            unit.running.append((module, None))  # if the next line fails, there was no use
            unit.running[-1] = (module, enter(unit))

        return hook

    def _after(self, unit: Unit, inner: bool) -> Callable[[torch.nn.Module, Any, Any], None]:
        leave = self._leave

        def hook(module: torch.nn.Module, _: Any, outputs: Any) -> None:
            if inner and torch.compiler.is_compiling():
                return
            if not unit.running or unit.running[-1][0] is not module:
                return
            _, use = unit.running.pop()
            if use is not None:
                leave(unit, use, outputs)

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
