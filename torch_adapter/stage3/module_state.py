"""model.state_dict() and load_state_dict() of a model whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from zerohvd.torch import compat
from zerohvd.torch.stage3 import placeholder
from zerohvd.torch.stage3.units import ModuleUnit, Units


class ModuleState:
    """Hooks that make the state dict of a sharded model, or of a part of it, a plain one.

    Saving goes unit by unit, all ranks together: besides the result, one unit is gathered at a
    time. A rank that saves alone takes the others' shards instead.
    Loading is local: every rank reads the whole state and keeps its part.
    """

    def __init__(self, model: nn.Module, units: Units) -> None:
        self._units = units
        self._outermost: nn.Module | None = None
        self._handles: list[Any] = []
        before, after = self._saving()
        for module in _with_params(model):
            self._handles += [
                module.register_state_dict_pre_hook(before),
                compat.register_state_dict_post_hook(module, after),
            ]
        for unit in units.all:
            before, after = self._loading(unit)
            for module in unit.modules:
                self._handles += [
                    module.register_load_state_dict_pre_hook(before),
                    module.register_load_state_dict_post_hook(after),
                ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- saving -----------------------------------------------------------------------------------

    def _saving(self) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            # Children come after their parents, under a longer prefix.
            if self._outermost is None or not prefix:
                self._outermost = module

        def after(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            if module is self._outermost:
                self._outermost = None
                self._fill(state)

        return before, after

    def _fill(self, state: dict[str, Any]) -> None:
        """Replace placeholders by values, and views of resized memory by copies.

        Parameters themselves stay: keep_vars=True asks for them.
        """
        parts = [part for unit in self._units.all for part in unit.parts]
        resized = {m.storage for part in parts for m in part.memories}
        wanted: dict[nn.Parameter, list[str]] = {}
        for key, value in state.items():
            if isinstance(value, placeholder.PlaceholderTensor):
                wanted.setdefault(placeholder.parameter_of(value), []).append(key)
            elif isinstance(value, nn.Parameter) or not isinstance(value, torch.Tensor):
                continue
            elif value.untyped_storage() in resized:
                state[key] = value.clone()
        for param, value in self._values(wanted):
            state.update(dict.fromkeys(wanted[param], value))

    def _values(
        self, wanted: Collection[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Copies of these parameters: gathered by all ranks, or taken from them by one alone."""
        peers = self._units.peers
        if not wanted or peers is None or peers.all_come("model.state_dict()"):
            if wanted and peers is not None:
                self._units.share_loaded()
            for param in self._units.stream(wanted):
                yield param, param.detach().clone()
            return
        yield from self._units.take(wanted).items()

    # -- loading ----------------------------------------------------------------------------------

    def _loading(self, unit: ModuleUnit) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
            if metadata.get("assign_to_params_buffers", False):
                raise ValueError(
                    "load_state_dict(assign=True) would give the model other parameters than the "
                    "optimizer's; leave assign out: the values are copied into the shards"
                )
            self._units.open(unit)
            members = {prefix + name: p for name, p in module.named_parameters()}
            found = {p: state[key] for key, p in members.items() if key in state}
            self._units.keep_for_others({p: found[p] for p in unit.params if p in found})

        def after(module: nn.Module, incompatible: Any) -> None:
            self._units.close(unit)

        return before, after


def _with_params(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            yield module
