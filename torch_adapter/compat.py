"""Names of torch and Horovod that are not public, each called in one place.

Tried with torch 2.13 and Horovod 0.28.1. Every entry says why it is needed and what happens
without it. No other module of the adapter uses such names.
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode

# TorchDispatchMode and pytree are what `deferred_init` records operators with. torch documents both
# as extension points, but keeps them in modules with an underscore. Without: no deferred_init.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map as tree_map
from torch.utils.data._utils import signal_handling


def without_memory() -> AbstractContextManager[Any]:
    """Return a context in which new tensors have a device and no memory; real ones may be read.

    `zero.plan` runs a micro-step in it. The meta device is public, but kernels are chosen by the
    device: attention on meta keeps a matrix of all pairs that it does not keep on a CPU.
    torch.compile traces with the same. Without: no plan knows activations.
    """
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


# -- autograd, tensors, modules ------------------------------------------------------------------


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


def in_transform() -> bool:
    """Return whether torch.func.grad, vmap or the like runs a function now. See the next one."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_of_transforms() -> AbstractContextManager[Any]:
    """Return a context in which no torch.func transform is applied to what is computed.

    A unit is gathered in the middle of a function that a transform runs. Its memory must be plain
    tensors all the same, and not be differentiated or batched. Without: "Cannot access data pointer
    of Tensor that doesn't have storage".
    """
    if not in_transform():
        return contextlib.nullcontext()
    return temporarily_clear_interpreter_stack()


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a torch.func transform has wrapped, or the tensor itself.

    Without: a transform of parameters that are sharded would compute with NaN.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


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


# The operator behind Tensor.item(), which `deferred_init` answers from values made for it. Without:
# item() of a deferred tensor fails.
ITEM = torch.ops.aten._local_scalar_dense.default


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a sparse tensor consists of.

    The public names refuse one that is not coalesced, as gradients of embeddings are. Without:
    memory reports leave out what they hold, or coalesce it.
    """
    return [tensor._indices(), tensor._values()]


# -- GradScaler ----------------------------------------------------------------------------------

# torch.amp.GradScaler.step() asks an optimizer for this attribute. Where it is true the optimizer
# unscales by itself: the scaler sets `grad_scale` and `found_inf` on it and calls step(). A plain
# scaler is recognised by that. Without it, a plain scaler finds no gradients before they have been
# reduced, and fails with "No inf checks were recorded for this optimizer".
_UNSCALES_ITSELF = "_step_supports_amp_scaling"
_SET_BY_SCALER = ("grad_scale", "found_inf")


def unscales_itself(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Let GradScaler leave the scale to `step()` of this class."""
    setattr(optimizer_class, _UNSCALES_ITSELF, True)


@contextlib.contextmanager
def unscaled_by_scaler(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, GradScaler unscales the optimizer's gradients as those of any other."""
    setattr(optimizer, _UNSCALES_ITSELF, False)
    try:
        yield
    finally:
        delattr(optimizer, _UNSCALES_ITSELF)


def take_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler has left its scale to `step()`; what it has set is removed."""
    found = [name for name in _SET_BY_SCALER if name in vars(optimizer)]
    for name in found:
        delattr(optimizer, name)
    return bool(found)


# -- Horovod's collectives -----------------------------------------------------------------------

# The public calls allocate an output in every call, and page faults on fresh memory cost more than
# moving the data. These take the output: an exact-size contiguous one is filled in place.


def reducescatter_start(x: torch.Tensor, out: torch.Tensor, name: str, process_set: Any) -> int:
    """Sum `x` over the ranks into `out`, this rank's part; returns Horovod's handle."""
    started: int = mpi_ops._reducescatter_async(
        x, out, name, mpi_ops.Sum, process_set, 1.0, 1.0
    )
    return started


def alltoall_start(
    x: torch.Tensor, splits: torch.Tensor, out: torch.Tensor, name: str, process_set: Any
) -> int:
    """Send `splits[r]` elements to each rank r, receive into `out`; returns Horovod's handle."""
    received = torch.empty(len(splits), dtype=torch.int32, device="cpu")
    started: int = mpi_ops._alltoall_async(x, splits, out, received, name, process_set)
    return started


def allgather_start(x: torch.Tensor, out: torch.Tensor, name: str, process_set: Any) -> int:
    """Gather the `x` of all ranks into `out`; returns Horovod's handle."""
    started: int = mpi_ops._allgather_async(x, out, name, process_set)
    return started


def is_done(handle: int) -> bool:
    """Whether synchronizing the handle would return, or raise, at once.

    poll() of a handle that has been synchronized already ends in a crash, so the map of open
    handles is asked first.
    """
    return handle not in mpi_ops._handle_map or bool(mpi_ops.poll(handle))


def replace_join(replacement: Callable[[], int | None]) -> None:
    """Let hvd.join() ask `replacement()`: a rank that it returns is what join() returns, after a
    barrier. None: go on as Horovod does.

    A rank that has joined answers for every operation in Horovod's response cache, but can only do
    allreduces: an alltoall of another rank ends in a segmentation fault (0.28.1). The library's own
    function is replaced, since scripts may have imported `join` before. Without: that crash.
    """
    library = mpi_ops.mpi_lib
    original = library.horovod_torch_join

    def join(output: torch.Tensor, device: int) -> int:
        last = replacement()
        if last is not None:
            output.fill_(last)
        handle: int = (
            original(output, device)
            if last is None
            else library.horovod_torch_barrier(mpi_ops.global_process_set.process_set_id)
        )
        return handle

    library.horovod_torch_join = join


# -- torch.optim -----------------------------------------------------------------------------------


def is_horovods(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer comes from hvd.DistributedOptimizer.

    Horovod makes a class on the spot, of the same name as that of the wrapped one:
    only its attributes tell. Without: gradients would be reduced twice.
    """
    return hasattr(optimizer, "_allreduce_delay")


def counts_calls(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody may count the calls of `step()`: hooks on it, or a `step` put in its place.

    There is no public way to ask for hooks. Without it they would run once per wave of a step.
    """
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    # A learning-rate scheduler made for the inner optimizer only notes that step() was called.
    step = vars(optimizer).get("step")
    replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    return any(hooks) or replaced


def with_state_dict_hooks(
    optimizer: torch.optim.Optimizer, make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Run `make` between the hooks that `register_state_dict_(pre|post)_hook` has registered.

    torch runs them in its own state_dict(), which this one replaces.
    """
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    made = make()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, made)
        made = made if changed is None else changed
    return made


def with_load_state_dict_hooks(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    load: Callable[[dict[str, Any]], None],
) -> None:
    """Run `load` between the hooks of `register_load_state_dict_(pre|post)_hook`, as torch does."""
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    load(state_dict)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def increment_version(params: Sequence[torch.Tensor]) -> None:
    """Tell autograd that the values have changed: a graph that saved the old ones must not be used.

    Placeholders of sharded parameters would refuse the call as one that needs their values.
    """
    with without_torch_function():
        torch.autograd.graph.increment_version(list(params))


# -- checkpoints -----------------------------------------------------------------------------------


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The model that torch.compile has wrapped, or the model itself.

    `_orig_mod` is in the names of a compiled model's state_dict, so torch keeps it; no public name
    leads to it (torch 2.6 to 2.13). Without it every name would have a prefix that the plain
    model's have not.
    """
    found = getattr(model, "_orig_mod", model)
    assert isinstance(found, torch.nn.Module)
    return found


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of a module itself that a state_dict holds.

    `_non_persistent_buffers_set` is the only record of `register_buffer(persistent=False)` (torch
    2.6 to 2.13); `state_dict()` would copy whole models at stage 3. Without it buffers that the
    user wants in no file would be stored.
    """
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


# -- processes that load data ----------------------------------------------------------------------


def keep_handlers_of_workers() -> None:
    """Let a DataLoader's workers keep the handler for TERM that they were forked with.

    `_set_worker_signal_handlers` puts torch's own in its place (torch 2.6 to 2.13), which ends a
    worker, and with it the training, when a scheduler signals all processes of a job. Without this,
    a job that is preempted by TERM fails if it has workers; USR1 is not affected.
    """
    set_handlers = getattr(signal_handling, "_set_worker_signal_handlers", None)
    if set_handlers is None or hasattr(set_handlers, "__wrapped__"):
        return

    @functools.wraps(set_handlers)
    def set_all_others() -> None:
        kept = signal.getsignal(signal.SIGTERM)
        set_handlers()
        if callable(kept):
            signal.signal(signal.SIGTERM, kept)

    signal_handling._set_worker_signal_handlers = set_all_others  # type: ignore[attr-defined]
