"""The full gradients of one rank, which backward passes add to, and what users see of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zerohvd.torch.gradients.stand_in import StandIn, is_stand_in


class LocalGrads:
    """The gradients that this rank has computed of the parameters of one section.

    Autograd adds to `param.grad`. From the time when gradients leave until the end of the step,
    `param.grad` is a stand-in for the reduced gradient, and the full one, as far as it has not
    left, is *hidden* here. Just before a backward pass adds to a gradient it is shown again.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._params = params
        self._kept: list[torch.Tensor | None] = [None] * len(params)
        self._hidden = [False] * len(params)
        self._published: dict[int, torch.Tensor] | None = None  # reduced gradients, by parameter
        self._stand_ins: list[StandIn] | None = None

    def stand_for(self, make: Callable[[torch.nn.Parameter, int], StandIn]) -> None:
        """Say what stands for a hidden gradient."""
        self._stand_ins = [make(param, index) for index, param in enumerate(self._params)]

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self._kept[index] if self._hidden[index] else self._params[index].grad

    def __setitem__(self, index: int, grad: torch.Tensor | None) -> None:
        if self._hidden[index]:
            self._kept[index] = grad
        else:
            self._params[index].grad = grad

    def present(self) -> list[int]:
        """The parameters that have a full gradient here."""
        return [i for i in range(len(self._params)) if self[i] is not None]

    def tensors(self) -> list[torch.Tensor]:
        """The full gradients that are here."""
        held = [self[index] for index in range(len(self._params))]
        return [grad for grad in held if grad is not None]

    def hide(self, index: int) -> None:
        param = self._params[index]
        if self._hidden[index] or self._stand_ins is None or not param.requires_grad:
            return
        self._kept[index], param.grad = param.grad, self._stand_ins[index]
        self._hidden[index] = True

    def show(self, index: int) -> None:
        """A backward pass is about to add to the gradient."""
        if self._hidden[index]:
            self._hidden[index] = False
            self._params[index].grad, self._kept[index] = self._kept[index], None

    def hide_all(self) -> None:
        for index in range(len(self._params)):
            self.hide(index)

    def publish(self) -> None:
        """The full gradients have been reduced in place: users see them until the step is over."""
        self._published = {}
        for index, (hidden, kept) in enumerate(zip(self._hidden, self._kept, strict=True)):
            # An empty parameter is in no bucket, and has no full gradient.
            if hidden and not self.is_dropped(index) and kept is not None:
                self._params[index].grad = kept
                self._published[index] = kept.detach()

    @property
    def published(self) -> bool:
        return self._published is not None

    def end(self) -> None:
        """The step is over: what is left of full gradients is the user's again."""
        for index, hidden in enumerate(self._hidden):
            if hidden and not self.is_dropped(index):
                self._params[index].grad = self._kept[index]
            self._kept[index] = None
        self._hidden = [False] * len(self._params)
        self._published = None

    def is_dropped(self, index: int) -> bool:
        """Whether the user has written `param.grad = None`: it shall not be updated."""
        return self._hidden[index] and self._params[index].grad is None

    def replaced(self) -> int | None:
        """The first parameter whose gradient the user has replaced by another tensor.

        In the place of a full gradient that has been reduced, the values of the new one count.
        """
        for index, kept in enumerate(self._kept):
            grad = self._params[index].grad if self._hidden[index] else None
            if grad is None or is_stand_in(grad):
                continue
            reduced = (self._published or {}).get(index)
            if reduced is None:
                if grad is kept:
                    continue
                return index
            # Also after `param.grad.data = ...` and `param.grad = param.grad.t()`.
            if (grad.data_ptr(), grad.stride()) != (reduced.data_ptr(), reduced.stride()):
                reduced.copy_(grad.clone())
                self._params[index].grad = self._kept[index] = reduced
        return None
