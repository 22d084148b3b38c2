"""Hooks on modules that unshard a unit before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from zerohvd.torch.stage3.units import ModuleUnit, Units


class UnitHooks:
    """Tells `units` when a unit's module runs, or a module inside it that is called on its own.

    The hooks live as long as the model, and so does `units`: the model cannot run without it.
    """

    def __init__(self, units: Units) -> None:
        # A compiler must not look into these; around them it may compile what it likes.
        self._enter = torch.compiler.disable(units.enter)
        self._leave = torch.compiler.disable(units.leave)
        self._handles: list[RemovableHandle] = []
        for unit in units.all:
            for module in unit.modules:
                inner = module is not unit.module
                self._handles += [
                    module.register_forward_pre_hook(self._before(unit, inner), prepend=True),
                    module.register_forward_hook(self._after(unit, inner), always_call=True),
                ]

    def _before(self, unit: ModuleUnit, inner: bool) -> Callable[[torch.nn.Module, Any], None]:
        enter = self._enter

        def hook(module: torch.nn.Module, _: Any) -> None:
            if inner and (torch.compiler.is_compiling() or unit.depth):
                return
            unit.running.append((module, None))  # if the next line fails, there was no use
            unit.running[-1] = (module, enter(unit))

        return hook

    def _after(self, unit: ModuleUnit, inner: bool) -> Callable[[torch.nn.Module, Any, Any], None]:
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
