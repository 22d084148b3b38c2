"""What `param.grad` is between backward() and step(): stands for the gradient that will be applied.

The full gradient of a rank leaves during the backward pass, and what comes back is this rank's
share of the sum. Scripts clip in between: with None in its place torch would clip nothing and say
nothing. So `param.grad` is a tensor without values that answers what such scripts ask:

- its norm is that of the reduced gradient of all ranks;
- operations in place, elementwise or by index, change the pieces that this rank owns;
- anything else raises an error that says what to write.

The first of these calls waits for the reduction, as `opt.synchronize()` does: all ranks make it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch

from zerohvd.errors import ShardedStateError
from zerohvd.torch.compat import without_torch_function


class Reduced(Protocol):
    """Where the reduced gradients are; see `Gradients`."""

    def norm_of(self, section: int, index: int, p: float) -> float:
        """Return the p-norm of a parameter's reduced gradient."""

    def change(self, section: int, index: int, change: Callable[[Any], None]) -> None:
        """Call `change(owned piece)` for all pieces of a parameter that have a gradient."""

    def full_of(self, section: int, index: int) -> torch.Tensor | None:
        """Return the whole reduced gradient, where a rank holds it (stage 0); else None."""

    def name_of(self, section: int, index: int) -> str: ...


_FUNCTIONS = {
    "numel", "nelement", "size", "dim", "ndimension", "element_size", "stride", "storage_offset",
    "get_device", "__len__", "__hash__", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_inference", "is_same_size", "is_tensor", "is_conj", "is_neg", "is_storage",
    "requires_grad_", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "zeros_like",
    "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "untyped_storage",
    "_is_view", "_is_zerotensor", "_has_compatible_shallow_copy_type",
}
_ALIASES = {"data", "detach", "detach_", "contiguous"}  # the same memory under another name
_VALUES = {"T", "H", "mT", "mH", "real", "imag"}  # attributes that are made of values
_NORMS = {"norm", "linalg_vector_norm", "linalg_norm"}
_ELEMENTWISE = {
    "mul_", "multiply_", "div_", "divide_", "true_divide_", "add_", "sub_", "subtract_", "neg_",
    "negative_", "clamp_", "clip_", "clamp_min_", "clamp_max_", "zero_", "fill_", "copy_",
    "nan_to_num_", "masked_fill_", "abs_", "sign_", "sgn_", "pow_", "sqrt_", "square_", "tanh_",
    "addcmul_", "addcdiv_", "lerp_", "__imul__", "__itruediv__", "__idiv__", "__iadd__", "__isub__",
    "__ipow__",
}
_FOREACH = "_foreach_"  # torch's own clipping calls these, on lists
_AMP = "_amp_"  # and torch's own GradScaler these
WRONG_SCALER = (
    "torch.amp.GradScaler looks at the gradients of one rank, so ranks would skip different steps: "
    "write scaler = zero.GradScaler(...) in its place, with the same arguments; a scaler class of "
    "your own derives from zero.GradScaler"
)


class _WithoutValues(torch.Tensor):
    """Has shape, dtype and device of a gradient; its one element of memory is NaN."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = _name(func)
        if name in _FUNCTIONS or (_is_attribute(func) and name not in _VALUES | _ALIASES):
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        return cls._asked_for_values(func, name, args, kwargs or {})

    @classmethod
    def _asked_for_values(
        cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise NotImplementedError


class StandIn(_WithoutValues):
    """What `param.grad` is once gradients have left."""

    _place: tuple[Callable[[], Reduced | None], int, int]  # weak: autograd's references to
    # gradients are invisible to the garbage collector

    @classmethod
    def _asked_for_values(
        cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name in _ALIASES and getattr(func, "__name__", "") != "__set__":
            return args[0]
        return _on_values(func, name, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal(self, "copy.deepcopy()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self, "pickling")


class ShareStandIn(_WithoutValues):
    """What the `.grad` of a piece in `opt.param_groups` is until the reduction has been waited for.

    With None in its place, `clip_grad_norm_(group["params"], ...)` would clip nothing and say
    nothing. It cannot be answered: every rank has other pieces there.
    """

    _name: str  # of the parameter

    @classmethod
    def _asked_for_values(
        cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name.startswith(_AMP):
            raise TypeError(WRONG_SCALER)
        found = _first((*args, *kwargs.values()), ShareStandIn)
        of = "a gradient" if found is None else f"the gradient of {found._name!r}"
        if name == "__repr__":
            return f"this rank's share of {of}, on its way"
        raise ShardedStateError(
            f"{name} through opt.param_groups, whose params are the pieces that this rank owns: "
            f"{of} is still on its way there, and other ranks have other pieces. Write "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), ...), or whatever it was, with "
            "the model's own parameters, whose .grad stands for the gradient of all ranks. This "
            "rank's share is there after opt.synchronize()"
        )


def make(param: torch.Tensor, owner: Reduced, section: int, index: int) -> StandIn:
    """Return what stands for the gradient of `param`."""
    made = _without_values(param, StandIn)
    made._place = (weakref.ref(owner), section, index)
    return made


def make_share(piece: torch.Tensor, name: str) -> ShareStandIn:
    """Return what stands for the gradient of this rank's piece of parameter `name`."""
    made = _without_values(piece, ShareStandIn)
    made._name = name
    return made


T = TypeVar("T", bound=torch.Tensor)


def _without_values(like: torch.Tensor, cls: type[T]) -> T:
    with without_torch_function():
        memory = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
        return memory.expand(like.shape).as_subclass(cls)


def clear(params: Iterable[torch.Tensor]) -> None:
    """Take stand-ins away whose owner is gone: nobody would answer for them."""
    for param in params:
        if is_stand_in(param.grad):
            param.grad = None


def is_stand_in(grad: torch.Tensor | None) -> bool:
    return type(grad) is StandIn


def _name(func: Any) -> str:
    """The name of a function, or of the attribute that it reads or writes."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if _is_attribute(func) else name


def _is_attribute(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


def _on_values(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "__repr__":  # a debugger's look must not wait for other ranks
        return f"{_describe(args[0])}, reduced and sharded over the ranks"
    whole = _whole(args)
    if whole is not None:
        return func(*whole, **kwargs)
    if name.startswith(_FOREACH):
        return _one_by_one(name.removeprefix(_FOREACH), args, kwargs)
    first = args[0] if args else None
    if isinstance(first, StandIn):
        if name in _NORMS:
            return _norm(first, name, args[1:], kwargs)
        if name in _ELEMENTWISE:
            return _change(first, _elementwise(func, first, args, kwargs))
        if name == "__setitem__":
            return _change(first, _indexed(first, *args[1:]))
    what = f".{name}" if _is_attribute(func) else f"{name}()"
    raise _refusal(_first((*args, *kwargs.values()), StandIn), what)


def _whole(args: tuple[Any, ...]) -> list[Any] | None:
    """The arguments with whole gradients in the place of stand-ins, at stage 0."""

    def real(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(real, value))
        if not isinstance(value, StandIn):
            return value
        owner, section, index = _found(value)
        full = owner.full_of(section, index)
        return value if full is None else full

    made = [real(value) for value in args]
    stands, left = _first(args, StandIn), _first(made, StandIn)
    return made if stands is not None and left is None else None


def _first(values: Any, cls: type[T]) -> T | None:
    for value in values:
        if isinstance(value, cls):
            return value
        found = _first(value, cls) if isinstance(value, (list, tuple)) else None
        if found is not None:
            return found
    return None


def _one_by_one(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch._foreach_NAME(list, ...) as NAME of each."""
    grads, *rest = args
    each = getattr(torch.Tensor, name)
    made = []
    for number, grad in enumerate(grads):
        own = [r[number] if isinstance(r, (list, tuple)) else r for r in rest]
        made.append(each(grad, *own, **kwargs))
    return None if name.endswith("_") else made


# -- norms -----------------------------------------------------------------------------------------


def _norm(grad: StandIn, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    said = dict(zip(("p", "dim", "keepdim"), args, strict=False))
    said.update({"p" if key == "ord" else key: value for key, value in kwargs.items()})
    p = said.pop("p", 2.0)
    said.pop("dtype", None)
    of_matrix = name == "linalg_norm" and p is not None
    if of_matrix or any(v is not None and v is not False for v in said.values()):
        raise _refusal(grad, f"{name}() of rows or columns")
    owner, section, index = _found(grad)
    norm = owner.norm_of(section, index, 2.0 if p in (None, "fro") else float(p))
    # In double precision, so that torch's clip_grad_norm_ scales exactly as opt.clip_grad_norm_.
    return torch.tensor(norm, dtype=torch.float64, device=grad.device)


# -- changes ---------------------------------------------------------------------------------------


def _change(grad: StandIn, change: Callable[[Any], None]) -> StandIn:
    owner, section, index = _found(grad)
    with torch.no_grad():
        owner.change(section, index, change)
    return grad


def _elementwise(
    func: Any, grad: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Any], None]:
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, StandIn):
            raise _refusal(value, f"{_name(func)}() with another gradient")

    def change(owned: Any) -> None:
        def cut(value: Any) -> Any:
            return _part(value, grad.shape, owned) if isinstance(value, torch.Tensor) else value

        func(owned.tensor.grad, *map(cut, args[1:]), **{k: cut(v) for k, v in kwargs.items()})

    return change


def _indexed(grad: StandIn, key: Any, value: Any) -> Callable[[Any], None]:
    touched = torch.zeros(grad.shape, dtype=torch.bool, device=grad.device)
    touched[key] = True
    values = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    values[key] = value

    def change(owned: Any) -> None:
        where = _part(touched, grad.shape, owned)
        owned.tensor.grad[where] = _part(values, grad.shape, owned)[where].to(
            owned.tensor.grad.dtype
        )

    return change


def _part(value: torch.Tensor, shape: torch.Size, owned: Any) -> torch.Tensor:
    """What belongs to a piece, of a tensor that has the parameter's shape or broadcasts to it."""
    target: torch.Tensor = owned.tensor.grad
    if value.dim() > 0:
        start, stop = owned.piece.param_span
        value = value.expand(shape).reshape(-1)[start:stop].view(target.shape)
    return value.to(target.device) if value.device != target.device and value.dim() else value


# -- errors ----------------------------------------------------------------------------------------


def _found(grad: StandIn) -> tuple[Reduced, int, int]:
    find, section, index = grad._place
    owner = find()
    if owner is None:
        raise ShardedStateError(
            "the sharded optimizer that had this gradient is gone: gradients live until the next "
            "zero_grad() or backward pass of their own optimizer"
        )
    return owner, section, index


def _describe(grad: Any) -> str:
    owner, section, index = _found(grad)
    return f"the gradient of {owner.name_of(section, index)!r}"


def _refusal(grad: Any, what: str) -> ShardedStateError:
    return ShardedStateError(
        f"{what} needs all values of {_describe(grad)}, which is reduced and sharded over the "
        "ranks. Norms work, and so do changes in place (clip_grad_norm_, clamp_, mul_, ...), on "
        "all ranks alike. For the norm of all gradients write opt.grad_norm(); this rank's share "
        'is the .grad of opt.param_groups[i]["params"] after opt.synchronize()'
    )
