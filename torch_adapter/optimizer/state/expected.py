"""What state an optimizer would make for a parameter: the measure of a state that is loaded.

A fused kernel takes the shapes of state tensors for granted and writes where the parameter's shape
says; other kernels broadcast, and train something else. So a state from outside is compared with
one that the optimizer itself makes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerohvd.checkpoint.values.likeness import check_finite
from zerohvd.torch.optimizer.partition import is_elementwise

# SGD goes without it: momentum may have been switched on later.
_OPTIONAL = "momentum_buffer"
# Options that choose a kernel and insist on a device; the state is the same without them.
_KERNELS = {"fused": False, "foreach": False, "capturable": False}


def new_state(
    inner: torch.optim.Optimizer,
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """The state after a first step, of tensors without memory; empty: nothing could be learned.

    Args:
        inner: The optimizer; it is not touched.
        options: Of the parameter group.
        shape, dtype: Of the parameter.
    """
    param = torch.empty(shape, dtype=dtype, device="meta").requires_grad_()
    param.grad = torch.empty(shape, dtype=dtype, device="meta")
    kernels = {k: v for k, v in _KERNELS.items() if k in options}
    trial = object.__new__(type(inner))
    own = {k: copy.copy(v) if isinstance(v, (dict, list)) else v for k, v in vars(inner).items()}
    vars(trial).update(own)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**options, **kernels, "params": [param]}]
    # Without what torch and schedulers wrap around it. Values are not there to be computed with:
    # an optimizer that asks for one fails, after it has made its state.
    step = inspect.unwrap(type(inner).step)
    with contextlib.suppress(Exception), torch.no_grad():
        step(trial)
    return dict(trial.state.get(param, {}))


class Expectations:
    """Compares states from outside with what an optimizer would make.

    Args:
        inner: The optimizer.
        options: Of its parameter groups, as they are going to be.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]]
    ) -> None:
        self._inner, self._options = inner, options
        self.elementwise = is_elementwise(inner)
        self._known: dict[tuple[int, tuple[int, ...], torch.dtype], dict[str, Any]] = {}

    def of(self, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, Any]:
        """As `new_state`, for a parameter of this group."""
        key = (group, shape, dtype)
        if key not in self._known:
            self._known[key] = new_state(self._inner, self._options[group], shape, dtype)
        return self._known[key]

    def check(
        self,
        state: Mapping[str, Any],
        name: str,
        group: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        """Raise unless a whole parameter's state is what this optimizer keeps.

        Args:
            state: Key -> a value, or anything that has a tensor's shape.
            name, group, shape, dtype: Of the parameter.
        """
        if state.get("step") is not None:
            _check_counter(state["step"], f"the state 'step' of {name!r}")
        shapes = [tuple(v.shape) for v in state.values() if hasattr(v, "shape")]
        if not state or not (self.elementwise or any(s not in (shape, ()) for s in shapes)):
            return
        expected = self.of(group, shape, dtype)
        for key, value in state.items():
            what = f"the state {key!r} of {name!r}"
            wanted = expected.get(key)
            if isinstance(wanted, torch.Tensor):
                _check_one(value, wanted, what, shape)
            elif self.elementwise and tuple(getattr(value, "shape", ())) not in (shape, ()):
                raise _other_shape(what, value, shape, shape)
        missing = sorted({*expected} - {*state} - {_OPTIONAL})
        if missing and self.elementwise:
            raise ValueError(
                f"the state of {name!r} lacks {missing[0]!r}, which {type(self._inner).__name__} "
                "needs: it is damaged, or of another optimizer"
            )


def _check_one(value: Any, wanted: torch.Tensor, what: str, shape: tuple[int, ...]) -> None:
    if value is None and what.startswith(f"the state {_OPTIONAL!r}"):
        return
    if wanted.dim() == 0 and not (shape == () and hasattr(value, "shape")):
        _check_counter(value, what)
    elif not hasattr(value, "shape") or tuple(value.shape) != tuple(wanted.shape):
        raise _other_shape(what, value, tuple(wanted.shape), shape)
    if isinstance(value, torch.Tensor) and _family(value) != _family(wanted):
        raise ValueError(f"{what} holds {value.dtype}, but this optimizer needs {wanted.dtype}")


def _check_counter(value: Any, what: str) -> None:
    single = isinstance(value, torch.Tensor) and value.numel() == 1
    if single and value.is_meta:
        return  # an outline of a state whose values were looked at where they are
    check_finite(value.item() if single else value, what)


def _family(x: torch.Tensor) -> tuple[bool, bool]:
    return x.is_floating_point(), x.is_complex()


def _other_shape(
    what: str, value: Any, wanted: tuple[int, ...], shape: tuple[int, ...]
) -> ValueError:
    found = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
    return ValueError(
        f"{what} has {found}, the parameter shape {shape}, and this optimizer needs {wanted}: it "
        "was saved for another model, or by an optimizer that needs partition='parameter'"
    )
