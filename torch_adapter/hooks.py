"""The only place that registers hooks on parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch


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
                    living._arrived(section, index)

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
