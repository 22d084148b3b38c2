"""A large parameter that two modules use: two gradients, and no third for their sum.

Autograd keeps the first gradient of such a parameter until the second one is there, and adds them
up in fresh memory where the first is a view, as that of a Linear layer is. For a tied embedding,
often the largest parameter, this is where a step needs most. Here the first one is kept aside,
autograd hands over the second as if it were alone, and the first is added to it in place. Of two
numbers the sum is the same either way. The second one of an embedding is not made at all: but for
the rows of the words of a batch it is zeros, so these rows are added to the first.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from zerohvd.torch.gradients.hooks import mark_own, only_own
from zerohvd.torch.pages import users
from zerohvd.torch.stage3.planning import tensors_in

# Less than this is not worth it.
_LARGE_BYTES = 1 << 20

# How far from a module's output its parameter's gradient is looked for: through the views and
# additions of a Linear layer.
_NEAR = 16


class TiedGradients:
    """Those of these parameters that two modules use. Make it before the optimizer's hooks."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        wanted = {p for p in params if p.requires_grad and _is_large(p)}
        self._pairs = [
            _Pair(param, modules)
            for param, modules in _modules_with(wanted).items()
            if len(modules) == 2
        ]

    def remove(self) -> None:
        for pair in self._pairs:
            pair.remove()


class _Kept:
    """A gradient that is kept aside."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad

    def writable(self) -> torch.Tensor:
        """The gradient, a contiguous copy if somebody else has it too."""
        other = torch.empty(1)
        nobodys = _Kept(other.view(1) if self.grad._is_view() else other)
        del other
        shared = any(a > b for a, b in zip(self._owners(), nobodys._owners(), strict=True))
        if shared or not self.grad.is_contiguous():
            self.grad = self.grad.clone(memory_format=torch.contiguous_format)
        return self.grad

    def _owners(self) -> list[int]:
        """In how many hands it is, and what it is a view of: Python's, the tensors', the bytes'."""
        counts = [users(self.grad.untyped_storage())]
        counts += [sys.getrefcount(self.grad), self.grad._use_count()]
        base = self.grad._base
        if base is not None:
            counts += [sys.getrefcount(base), base._use_count()]
        return counts


class _Pair:
    """One such parameter. Called as a forward hook of its modules."""

    def __init__(self, param: nn.Parameter, modules: Collection[nn.Module]) -> None:
        self._param = weakref.ref(param)
        self._uses = 0  # in forward passes since the last gradient
        self._aside: _Kept | None = None
        self._task = -1  # the backward pass that it is of
        self._handles: list[Any] = [m.register_forward_hook(self) for m in modules]
        self._handles.append(param.register_post_accumulate_grad_hook(self._join))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> Any:
        """A copy of the model, or one from a file, has a hook that does nothing, and not ours."""
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __call__(self, module: nn.Module, _: Any, outputs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        param = self._param()
        if param is None or not param.requires_grad:
            return
        if torch._C._current_graph_task_id() == -1:
            self._aside = None  # of a backward pass that has failed
        self._uses += 1
        edge = _edge_to(param, outputs) if self._uses <= 2 else None
        if edge is None:
            return
        node, index = edge
        if self._uses == 2:  # the last one used has the first gradient
            node.register_hook(lambda grads, _: self._take(grads, index))
        elif node.name() == "EmbeddingBackward0" and not _saves_elsewhere():
            node.register_prehook(self._add_rows)

    def _take(self, grads: tuple[torch.Tensor | None, ...], index: int) -> Any:
        """Keep a gradient aside, where nobody but the optimizer will miss it."""
        grad, param = grads[index], self._param()
        if grad is None or grad.is_sparse or param is None or not _alone(param):
            return None
        # One may be there: graphs of several forward passes can be of one backward pass, and
        # another backward pass can run inside this one.
        if self._uses != 2 or self._aside is not None:
            return None
        self._aside, self._task = _Kept(grad), torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        return (*grads[:index], None, *grads[index + 1 :])

    def _add_rows(self, grads: tuple[torch.Tensor | None, ...]) -> Any:
        """Add an embedding's gradient to the one kept aside, in the place of making it."""
        grad, node = grads[0], torch._C._current_autograd_node()
        if grad is None or self._aside is None or self._is_of_another_pass() or node._saved_sparse:
            return None
        words, places = node._saved_indices.unique(return_inverse=True)
        nobody = node._saved_padding_idx >= 1 << 63  # -1, as an unsigned number
        padding = () if nobody else (words == node._saved_padding_idx).nonzero()
        rows = torch.ops.aten.embedding_dense_backward(
            grad,
            places,
            len(words),
            int(padding) if len(padding) else -1,
            node._saved_scale_grad_by_freq,
        )
        self._aside.writable().index_add_(0, words, rows)
        return (None,)

    def _join(self, param: torch.Tensor) -> None:
        """The sum of the others has come: none, where they have no part in the loss, or where it
        has been added already."""
        self._uses = 0
        aside = self._aside
        if aside is None or self._is_of_another_pass():
            return
        self._aside = None
        with torch.no_grad():
            if param.grad is None:
                param.grad = aside.writable()
            elif param.grad.is_sparse:
                param.grad = aside.grad + param.grad
            else:
                param.grad.add_(aside.grad)

    mark_own(_join)

    def _is_of_another_pass(self) -> bool:
        return self._task != torch._C._current_graph_task_id()

    def _end(self) -> None:
        """The backward pass is over. Not every torch calls hooks where no gradient has come."""
        param = self._param()
        if self._aside is not None and param is not None:
            self._task = torch._C._current_graph_task_id()
            for hook in list(param._post_accumulate_grad_hooks.values()):
                hook(param)


def _saves_elsewhere() -> bool:
    """Whether what autograd saves goes through hooks, as of a checkpoint, which give it back
    once and not twice."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _modules_with(params: Collection[nn.Parameter]) -> dict[nn.Parameter, list[nn.Module]]:
    """The modules that have these parameters: an optimizer is not told of the model."""
    found: dict[nn.Parameter, list[nn.Module]] = {}
    for module in gc.get_objects() if params else ():
        if issubclass(type(module), nn.Module):  # isinstance() would ask proxies what they are
            for param in dict.fromkeys(vars(module).get("_parameters", {}).values()):
                if param in params:
                    found.setdefault(param, []).append(module)
    return found


def _is_large(param: nn.Parameter) -> bool:
    nbytes = param.numel() * param.element_size()
    return param.device.type in ("cpu", "meta") and nbytes >= _LARGE_BYTES


def _alone(param: nn.Parameter) -> bool:
    """Whether this backward pass adds to the parameter's gradient, and only the optimizer looks."""
    # Hooks of the user's could see one of the two gradients, and take it for the sum.
    if torch.is_grad_enabled() or param.grad is not None or not only_own(param):
        return False
    try:
        end = torch.autograd.graph.get_gradient_edge(param).node
        return bool(torch._C._will_engine_execute_node(end))
    except RuntimeError:  # autograd.grad() wants this very gradient for itself
        return False


def _edge_to(param: nn.Parameter, outputs: Any) -> tuple[Any, int] | None:
    """The one node near the outputs that hands a gradient to the parameter."""
    found: list[torch.Tensor] = []
    tensors_in(outputs, found)
    nodes = [t.grad_fn for t in found if t.grad_fn is not None]
    edges: list[tuple[Any, int]] = []
    for node in nodes:  # which grows
        for index, (after, _) in enumerate(node.next_functions):
            if after is None:
                continue
            if getattr(after, "variable", None) is param:
                edges.append((node, index))
            elif len(nodes) < _NEAR and after not in nodes:
                nodes.append(after)
    return edges[0] if len(edges) == 1 else None
