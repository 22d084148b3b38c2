"""Placeholder of a sharded parameter: raises an error with the parameter's name on access.

The parameter keeps its identity, shape, dtype, gradient and hooks. Its data is a tensor of one
element, expanded to the shape. Whatever would read its values gathers it if a pass of the model
runs, and raises otherwise; whatever would write them raises.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from zerohvd.errors import ShardedStateError
from zerohvd.torch.compat import tree_iter, tree_map, without_torch_function
from zerohvd.torch.params.owned import units_of

_NAME, _PARAM = "_zerohvd_name", "_zerohvd_param"

# Attributes and functions that need no values.
_ATTRIBUTES = {
    "shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "grad_fn", "layout", "ndim",
    "names", "output_nr", "name", "itemsize", "nbytes", "_version", "_backward_hooks",
    "_post_accumulate_grad_hooks", "is_sparse", "is_sparse_csr", "is_meta", "is_cuda", "is_cpu",
    "is_xpu", "is_mps", "is_mtia", "is_quantized", "is_nested", "is_mkldnn", "is_maia",
    "is_ipu", "is_vulkan", "is_xla", "retains_grad", "volatile", "_base", "_grad",
    "_has_symbolic_sizes_strides",
}
_SETTABLE = {"requires_grad", "grad", "_grad", "_backward_hooks"}
_FUNCTIONS = {
    "numel", "nelement", "size", "dim", "ndimension", "element_size", "stride",
    "storage_offset", "get_device", "__len__", "__hash__", "is_contiguous", "is_floating_point",
    "is_complex", "is_signed", "is_inference", "is_same_size", "is_shared", "is_pinned",
    "is_tensor", "is_conj", "is_neg", "is_storage", "requires_grad_", "register_hook",
    "register_post_accumulate_grad_hook", "retain_grad", "new_zeros", "new_ones", "new_empty",
    "new_full", "new_tensor", "new_empty_strided", "zeros_like", "ones_like", "empty_like",
    "full_like", "rand_like", "randn_like", "has_names", "__dir__", "_is_view",
    "_has_compatible_shallow_copy_type", "increment_version", "_increment_version",
    "__dlpack_device__", "_is_zerotensor",
}


def _accessors(names: Iterable[str], *kinds: str) -> set[Any]:
    """What torch calls for these attributes, as far as this torch has them."""
    found = [getattr(torch.Tensor, name, None) for name in names]
    return {getattr(a, kind) for a in found for kind in kinds if hasattr(a, kind)}


# Asked for by the hundred in every step: one look-up must do.
_FREE = _accessors(_ATTRIBUTES, "__get__") | _accessors(_SETTABLE, "__set__", "__delete__")


class _Placeholder:
    """Lets through what needs no values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _FREE:
            with without_torch_function():
                return func(*args)
        return _call_without_values(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Any:
        raise refusal(self, "copy.deepcopy()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal(self, "pickling")


@functools.cache
def _placeholder_class(kind: type[torch.nn.Parameter]) -> type[torch.nn.Parameter]:
    """The class that parameters of class `kind` have while they are placeholders."""
    return type(f"Placeholder{kind.__name__}", (_Placeholder, kind), {"_zerohvd_kind": kind})


class PlaceholderTensor(_Placeholder, torch.Tensor):
    """What `detach()` and `.data` give of a parameter without values."""


def _call_without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    attribute = ""
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    if attribute == "data" and name == "__set__" and args[1] is args[0]:
        return None  # model.to() of where it is already
    if not attribute and name in _FUNCTIONS:
        with without_torch_function():
            return func(*args, **kwargs)
    if name == "detach" or (attribute == "data" and name == "__get__"):
        return _detached(args[0])
    if name == "__repr__":
        return _describe(args[0])
    if func is torch.autograd.grad:
        args, kwargs = tree_map(_edge, (args, kwargs))
        return func(*args, **kwargs)
    if name in ("to", "cpu") and _goes_nowhere(args, kwargs):
        return args[0]
    found = [leaf for leaf in tree_iter((args, kwargs)) if is_placeholder(leaf)]
    if found and not _writes(name, kwargs) and all(_borrow(leaf) for leaf in found):
        args, kwargs = tree_map(_with_values, (args, kwargs))
        return func(*args, **kwargs)
    raise refusal(found[0] if found else None, f".{attribute}" if attribute else f"{name}()")


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes its first argument, or `out`: a sharded one would lose it."""
    if name in ("__set__", "__delete__", "__setitem__") or kwargs.get("out") is not None:
        return True
    if name.startswith("__i"):  # __iadd__ and others
        return name not in ("__iter__", "__invert__", "__index__", "__int__")
    return name.endswith("_") and not name.endswith("__")


def _borrow(placeholder: Any) -> bool:
    """Gather the parameter for the pass that runs now; False: there is none."""
    param = parameter_of(placeholder)
    units = units_of(param)
    return units is not None and (not is_placeholder(param) or units.borrow_for(param))


def _edge(value: Any) -> Any:
    """The place in the graph that is all a backward pass needs of a parameter."""
    if not is_placeholder(value):
        return value
    with without_torch_function():
        return torch.autograd.graph.get_gradient_edge(value)


def _with_values(value: Any) -> Any:
    """What `detach()` gave of a parameter that was sharded then and is gathered now."""
    return parameter_of(value).detach() if isinstance(value, PlaceholderTensor) else value


def _goes_nowhere(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `.to(...)` asks for the device and dtype that the parameter has already."""
    with without_torch_function():
        param = args[0]
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, torch.dtype) and value != param.dtype:
                return False
            if isinstance(value, (str, torch.device)) and torch.device(value) != param.device:
                return False
            if isinstance(value, (int, torch.Tensor)) and not isinstance(value, bool):
                return False
        return not kwargs.get("copy", False)


def _detached(placeholder: torch.Tensor) -> PlaceholderTensor:
    with without_torch_function():
        view = torch.Tensor.detach(placeholder).as_subclass(PlaceholderTensor)
    setattr(view, _NAME, getattr(placeholder, _NAME))
    setattr(view, _PARAM, getattr(placeholder, _PARAM, placeholder))
    return view


def _describe(placeholder: Any) -> str:
    with without_torch_function():
        shape, dtype = tuple(placeholder.shape), placeholder.dtype
    return f"Parameter {getattr(placeholder, _NAME)!r} {shape} of {dtype}, sharded over the ranks"


# Horovod's first question about a tensor. Were it answered, Horovod would write behind the memory.
_TO_BROADCAST = (
    " If this is hvd.broadcast_parameters(): leave it out, as zero.zeroify() has given all ranks "
    "the parameters of the first one; to restore saved ones, call model.load_state_dict() on every "
    "rank."
)


def refusal(placeholder: Any, what: str) -> ShardedStateError:
    """The error for a use of a sharded parameter's values."""
    name = getattr(placeholder, _NAME, "?")
    return ShardedStateError(
        f"{what} needs the values of parameter {name!r}, which is sharded over the ranks: no rank "
        "holds it whole now. Run the module that uses it, or read and write it, on every rank, "
        "inside `with zero.gathered(module_or_parameter):` (writable=True to write); for all of "
        "them call model.state_dict()."
        + (_TO_BROADCAST if what == "type()" else "")
    )


def is_placeholder(tensor: Any) -> bool:
    return isinstance(tensor, _Placeholder)


def parameter_of(tensor: Any) -> torch.nn.Parameter:
    """The parameter behind what `detach()` gave."""
    param: torch.nn.Parameter = getattr(tensor, _PARAM, tensor)
    return param


def data_for(param: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's shape without its memory; its values are NaN."""
    with without_torch_function():
        return torch.full((), float("nan"), dtype=param.dtype, device=param.device).expand(
            param.shape
        )


def hide(param: torch.nn.Parameter, data: torch.Tensor, name: str) -> None:
    """Turn a parameter into a placeholder, with `data` of `data_for`."""
    with without_torch_function():
        param.data = data
    setattr(param, _NAME, name)
    if not is_placeholder(param):
        param.__class__ = _placeholder_class(type(param))


def show(param: torch.nn.Parameter, data: torch.Tensor) -> None:
    """Turn a placeholder into the parameter that it was again, with these values."""
    param.__class__ = getattr(type(param), "_zerohvd_kind", type(param))
    with without_torch_function():  # a class of the user's may have its own
        param.data = data
