"""Hooks that tell when a backward pass has made a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle


class Owner(Protocol):
    """Takes gradients."""

    def expected(self, section: int, index: int) -> None: ...

    def arrived(self, section: int, index: int) -> None: ...


class GradHooks:
    """Calls `owner.expected(section, index)` just before autograd adds to `params[index].grad`,
    and `owner.arrived(section, index)` when it has done so.

    The hooks live as long as the parameters, so they must not keep the owner alive.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], owner: Owner, section: int) -> None:
        self._owner = weakref.ref(owner)
        self._section = section
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(self._make(index))
            for index, param in enumerate(params)
        ]
        self._handles += [
            param.register_hook(self._make_before(index)) for index, param in enumerate(params)
        ]

    def _make(self, index: int) -> Callable[[torch.Tensor], None]:
        owner, section = self._owner, self._section

        def hook(_: torch.Tensor) -> None:
            living = owner()
            if living is None:
                return
            if not torch.is_grad_enabled():
                living.arrived(section, index)
            else:  # in a backward pass with create_graph=True
                with torch.no_grad():
                    living.arrived(section, index)

        return hook

    def _make_before(self, index: int) -> Callable[[torch.Tensor], None]:
        owner, section = self._owner, self._section

        def hook(_: torch.Tensor) -> None:
            living = owner()
            if living is not None:
                living.expected(section, index)

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
