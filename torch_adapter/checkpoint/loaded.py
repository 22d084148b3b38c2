"""What is put in the place of an optimizer's state and of other objects' states, checked before."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerohvd.checkpoint import CheckpointMismatchError
from zerohvd.checkpoint.format import SAFETENSORS
from zerohvd.checkpoint.session import Change
from zerohvd.checkpoint.values.likeness import check_number, check_options, check_state
from zerohvd.checkpoint.values.tree import decode
from zerohvd.torch.communication import arrays
from zerohvd.torch.optimizer.state.expected import Expectations
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer

State = dict[str, Any]  # of one parameter
_MEMBERS = ("params", "param_names")


def check_groups(groups: Any) -> None:
    """Raise unless a checkpoint's parameter groups look like some."""
    for group in groups if isinstance(groups, list) else (None,):
        params = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(params, list) or not all(isinstance(n, str) for n in params):
            raise CheckpointMismatchError(
                "state.groups of the checkpoint is no list of parameter groups: each has the names "
                "of its params, and options"
            )


class LoadedState:
    """State and options that an inner optimizer is going to have.

    Args:
        opt: Whose inner optimizer.
        groups: As `check_groups` accepts them.

    Raises:
        CheckpointMismatchError: The options are no options of this optimizer.
    """

    def __init__(self, opt: ZeroOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
        self.opt = opt
        self._options: list[State] = []
        for number, (held, group) in enumerate(zip(opt.inner.param_groups, groups, strict=True)):
            stored: Any = group.get("options")
            check_options(stored, held, f"state.groups.{number}.options")
            self._options.append({**held, **copy.deepcopy(dict(stored))})
        self._group = {p: n for n, members in enumerate(opt.groups) for p in members}
        self._expected = Expectations(opt.inner, self._options)

    def check(
        self, state: Mapping[str, Any], param: torch.nn.Parameter, name: str, dtype: torch.dtype
    ) -> None:
        """Raise unless the optimizer would keep such a state for the parameter `param`.

        Args:
            state: Key -> value, or description of a stored tensor.
            param: The whole parameter.
            name: Its.
            dtype: That the optimizer updates.
        """
        self._expected.check(state, name, self._group[param], tuple(param.shape), dtype)

    def fitted(self, values: State, param: torch.nn.Parameter, updated: torch.dtype) -> State:
        """Checked values as kernels expect them."""
        found = dict(values)
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                dtype = self.dtype(param, updated, key, value.dtype)
                wider = torch.promote_types(dtype, value.dtype)  # counters may stay so
                found[key] = value.to(wider if key == "step" else dtype)
            elif self._expected.elementwise and not param.dim() and key != "step":
                wanted = self._expected.of(self._group[param], (), updated).get(key)
                if isinstance(wanted, torch.Tensor) and value is not None:
                    found[key] = torch.tensor(value, dtype=wanted.dtype, device=param.device)
        return found

    def dtype(
        self, param: torch.nn.Parameter, updated: torch.dtype, key: str, stored: torch.dtype
    ) -> torch.dtype:
        """That of a state tensor of a parameter whose dtype for the optimizer is `updated`."""
        if not self._expected.elementwise:
            return stored
        wanted = self._expected.of(self._group[param], tuple(param.shape), updated).get(key)
        return wanted.dtype if isinstance(wanted, torch.Tensor) else stored

    def decode(self, stored: Mapping[str, Any], param: torch.Tensor, name: str) -> State:
        """State that is no array, from [dtype of a tensor or "", value]."""
        found: State = {}
        options = self._options
        for key, said in stored.items():
            what = f"values[{name!r}].{key}"
            if not isinstance(said, list) or len(said) != 2:
                raise CheckpointMismatchError(f"{what} should be a dtype and a value")
            dtype, value = said[0], decode(said[1], _no_array)
            if dtype != "":
                if not isinstance(dtype, str) or dtype not in SAFETENSORS:
                    raise CheckpointMismatchError(f"{what} has no dtype that can be stored")
                check_number(value, what)
                value = torch.tensor(value, dtype=arrays.dtype_of(dtype), device="cpu")
                if any(g.get("capturable") or g.get("fused") for g in options):
                    value = value.to(param.device)
            found[key] = value
        return found

    def settle(self, state: Mapping[torch.Tensor, State]) -> None:
        """Let torch bring states of its older versions up to date, on a copy of the optimizer.

        It does so after every load. If it cannot, nothing has happened yet.
        """
        trial = object.__new__(type(self.opt.inner))
        vars(trial).update(vars(self.opt.inner))
        values = defaultdict(dict, {param: dict(of) for param, of in state.items()})
        trial.__setstate__({"state": values, "param_groups": [dict(g) for g in self._options]})

    def options_change(self) -> Change:
        """The options of parameter groups."""
        groups = self.opt.inner.param_groups
        before = [dict(group) for group in groups]

        def put() -> None:
            for held, new in zip(groups, self._options, strict=True):
                held.update({k: v for k, v in new.items() if k not in _MEMBERS})

        def undo() -> None:
            for held, old in zip(groups, before, strict=True):
                held.clear()
                held.update(old)

        return Change("state.groups", put, undo)

    def put_state(
        self, state: Mapping[torch.Tensor, State], frozen: Mapping[torch.nn.Parameter, State]
    ) -> None:
        """Once everything has been read."""
        opt = self.opt
        opt.inner.state.clear()
        opt.inner.state.update(state)
        opt.unsharded.clear()
        opt.unsharded.update(frozen)
        # What torch does after loading: states of older versions become those of this one.
        opt.inner.__setstate__({"state": opt.inner.state, "param_groups": opt.inner.param_groups})


def _no_array(name: Any, of: Any) -> Any:
    raise ValueError(f"it refers to an array {name!r}, where only numbers can be")


# -- objects of others -----------------------------------------------------------------------------


def state_change(what: str, of: Any, stored: Any) -> Change:
    """A scheduler's or scaler's state."""
    check_state(stored, of, what)
    attributes = dict(vars(of)) if hasattr(of, "__dict__") else None
    before = copy.deepcopy(of.state_dict())

    def undo() -> None:
        if attributes is not None:
            vars(of).clear()
            vars(of).update(attributes)
        if before:
            of.load_state_dict(before)  # for what lies in objects of its own

    return Change(what, lambda: of.load_state_dict(copy.deepcopy(stored)), undo)


def extra_state_change(what: str, module: torch.nn.Module, stored: Any) -> Change:
    """A module's extra state."""
    before = copy.deepcopy(module.get_extra_state())
    return Change(
        what, lambda: module.set_extra_state(stored), lambda: module.set_extra_state(before)
    )
