"""One micro-step on tensors without memory: what it would hold, and when."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zerohvd.planning.timeline import Event, Timeline, thinned
from zerohvd.torch import compat
from zerohvd.torch.compat import TorchDispatchMode, tree_iter, tree_map

Loss = Callable[[Any], torch.Tensor]


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of tensors that operators make inside, from their making to their end.

    Attributes:
        live: Bytes now.
        most: The most bytes so far.
        events: Every change, and the gradients that were noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.events: list[Event] = []
        # By identity, which is a storage's own as long as it lives; None: it does not count.
        self._known: dict[int, Any] = {}
        self._ignored: list[Any] = []

    def ignore(self, tensor: torch.Tensor) -> None:
        """Do not count the memory of this tensor, also if it has been counted."""
        storage = tensor.untyped_storage()
        if self._known.get(id(storage), None) is not None:
            self._change(-storage.nbytes())
        # Its end must not count either, and frees the identity for another one.
        key = id(storage)
        self._known[key] = None
        self._ignored.append(weakref.ref(storage, lambda _: self._forget(key)))

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether it was made inside, and is neither a parameter nor an input."""
        return self._known.get(id(storage)) is not None

    def note_gradient(self, param: int) -> None:
        """A gradient is complete; its memory was ignored."""
        self.events.append(Event(self.live, param))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                self._see_old(value)
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                self._see(value)
        return out

    def _see_old(self, tensor: torch.Tensor) -> None:
        """What goes into an operator and was not made inside has been there before."""
        if id(tensor.untyped_storage()) not in self._known:
            self.ignore(tensor)

    def _forget(self, key: int) -> None:
        self._known.pop(key, None)

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        nbytes = storage.nbytes()

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self._change(-nbytes)

        self._known[key] = weakref.ref(storage, gone)
        self._change(nbytes)

    def _change(self, nbytes: int) -> None:
        self.live += nbytes
        self.most = max(self.most, self.live)
        self.events.append(Event(self.live))


def measure(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    batch: Any,
    loss: Loss | None,
    device: torch.device,
) -> Timeline:
    """Run the forward and backward pass of a model, without memory and without a trace in it.

    Args:
        params: Those that are trained, in the order of the plan.
        batch: What the model is called with: a tensor, a tuple of arguments, or a dict of keywords.
        loss: Of the model's output; None: its `loss`, or the sum of its first tensor.
        device: Whose kernels are meant.
    """
    number = {p: i for i, p in enumerate(params)}
    with compat.without_memory():
        tensors = _without_memory(model, number, device)
        args, kwargs = _call(tree_map(lambda x: _like(x, device), batch))
        tracker = AllocationTracker()
        for tensor in (*tensors.values(), *tree_iter((args, kwargs))):
            if isinstance(tensor, torch.Tensor):
                tracker.ignore(tensor)
        for param, index in number.items():
            _note_arrival(tensors[param], index, tracker)
        saved = _Saved(tracker)
        with tracker:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
                named = {n: tensors[t] for n, t in _named(model)}
                out = torch.func.functional_call(model, named, args, kwargs)
                total = _loss_of(out, loss)
            kept = saved.nbytes()
            del out
            total.backward()
    how = f"one micro-step on {device.type} kernels, without memory"
    return Timeline(thinned(tracker.events), kept, how)


class _Saved:
    """The storages that autograd has saved, without parameters and inputs."""

    def __init__(self, tracker: AllocationTracker) -> None:
        self._tracker = tracker
        self._storages: dict[int, Any] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self._tracker.counts(storage):
            self._storages[id(storage)] = weakref.ref(storage)
        # Detached: an output that is saved by its own operator would never be freed.
        return tensor.detach()

    def nbytes(self) -> int:
        alive = [ref() for ref in self._storages.values()]
        return sum(s.nbytes() for s in alive if s is not None)


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _without_memory(
    model: nn.Module, trained: dict[nn.Parameter, int], device: torch.device
) -> dict[torch.Tensor, torch.Tensor]:
    """Tensors that stand for the model's, tied ones as one."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for _, tensor in _named(model):
        if tensor not in made:
            made[tensor] = _like(tensor, device).requires_grad_(tensor in trained)
    return made


def _like(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _note_arrival(param: torch.Tensor, index: int, tracker: AllocationTracker) -> None:
    def arrived(p: torch.Tensor) -> None:
        assert p.grad is not None
        if p.grad.layout == torch.strided:
            tracker.ignore(p.grad)
        tracker.note_gradient(index)
        p.grad = None  # where gradients lie afterwards depends on the stage

    param.register_post_accumulate_grad_hook(arrived)


def _loss_of(out: Any, loss: Loss | None) -> torch.Tensor:
    if loss is not None:
        total = loss(out)
        if not isinstance(total, torch.Tensor) or total.numel() != 1:
            raise TypeError(f"loss must return a tensor of one element, got {type(total).__name__}")
        return total
    own = getattr(out, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    values = getattr(out, "__dict__", None) if not isinstance(out, torch.Tensor) else out
    for value in tree_iter(out if values is None else values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.float().sum()
    raise TypeError(f"the model returns no tensor with a gradient, but {type(out).__name__}")
