"""PyTorch's private names that zerohvd needs, each with the reason and what happens without it.

Tried on torch 2.13. No other module of the adapter uses these names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

# TorchDispatchMode and pytree are what `deferred_init` records operators with. torch documents both
# as extension points, but keeps them in modules with an underscore. Without: no deferred_init.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map as tree_map


def in_backward() -> bool:
    """Return whether this thread runs a backward pass.

    A module that runs inside a backward pass is recomputed by activation checkpointing, and must
    not count as the forward pass of the next step. torch has no public name for this. Without: the
    prefetch order of stage 3 is wrong with checkpointing, and parameters are freed too early.
    """
    return torch._C._current_graph_task_id() != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once, at the end of the backward pass that is running now.

    DDP and FSDP use the same call. Without: the units gathered last stay gathered until step().
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which tensor subclasses act as plain tensors.

    `__torch_function__` of a placeholder has to reach the plain attribute. That of torch.Tensor
    does the same, but converts results. Without: endless recursion.
    """
    return torch._C.DisableTorchFunctionSubclass()


def without_torch_function_modes() -> AbstractContextManager[None]:
    """Return a context without tensor subclasses and without function modes.

    `deferred_init` must see that its tensors are on the meta device while its own function mode
    says that they are on the host. Without: endless recursion.
    """
    return torch._C.DisableTorchFunction()


def swap_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchange the contents of two tensor objects.

    The public torch.utils.swap_tensors refuses tensors with weak references, which parameters of
    recurrent layers have: those refer to the object, which stays. Without: recurrent layers cannot
    be built under `deferred_init`.
    """
    torch._C._swap_tensor_impl(a, b)


def operator_arguments(operator: Any) -> list[tuple[str, bool]]:
    """Return (name, whether it is written to) of an operator's arguments.

    Only the schema says which arguments an operator writes to. Without: no deferred_init.
    """
    return [
        (a.name, a.alias_info is not None and a.alias_info.is_write)
        for a in operator._schema.arguments
    ]


def operator_name(operator: Any) -> str:
    """Return an operator's name without its overload, as "fill_" of aten::fill_.Scalar."""
    return str(operator._schema.name).removeprefix("aten::")


def register_state_dict_post_hook(module: nn.Module, hook: Callable[..., None]) -> Any:
    """Call `hook(module, state_dict, prefix, metadata)` after `module.state_dict()`.

    Public from torch 2.5 on, private under another name before.
    """
    public = getattr(module, "register_state_dict_post_hook", None)
    return (public or module._register_state_dict_hook)(hook)
