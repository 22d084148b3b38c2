"""The only place that registers hooks on parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class GradHooks:
    """Calls `finished(index)` whenever the gradient of `params[index]` has been accumulated."""

    def __init__(
        self, params: Sequence[torch.nn.Parameter], finished: Callable[[int], None]
    ) -> None:
        self._finished = finished
        self._handles = [
            param.register_post_accumulate_grad_hook(self._make(index))
            for index, param in enumerate(params)
        ]

    def _make(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            # A backward pass with create_graph=True runs hooks with gradients switched on.
            with torch.no_grad():
                self._finished(index)

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
