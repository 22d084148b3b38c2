"""The inner optimizer's state: whole and by parameter outside, sharded inside."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from zerohvd.config import ZeroConfig
from zerohvd.torch.communication import arrays
from zerohvd.torch.communication.collectives import TorchCollectives
from zerohvd.torch.gradients.section import Section
from zerohvd.torch.optimizer.state.expected import Expectations
from zerohvd.torch.params.owned import NamedParam, OwnedPiece
from zerohvd.training import state as core

State = dict[str, Any]


class Held(Protocol):
    """What a whole state is made of; see ZeroOptimizer."""

    inner: torch.optim.Optimizer
    groups: list[list[torch.nn.Parameter]]
    unsharded: dict[torch.nn.Parameter, State]
    prefix: str

    @property
    def sections(self) -> Sequence[Section]: ...


class Sharded(Held, Protocol):
    """A sharded optimizer, as far as its state is concerned; see ZeroOptimizer."""

    config: ZeroConfig
    named: dict[torch.nn.Parameter, NamedParam]

    def sharded_params(self) -> set[torch.nn.Parameter]: ...



# -- from whole to sharded ---------------------------------------------------------------------


def detach_state(inner: torch.optim.Optimizer) -> dict[Any, State]:
    """Take the state out of an optimizer that is about to be sharded."""
    held = {p: dict(values) for p, values in inner.state.items()}
    inner.state.clear()
    return held


def _cut(key: str, value: Any, owned: OwnedPiece, param: torch.nn.Parameter) -> Any:
    """The part of a parameter's state that belongs to a piece of it."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    part, piece = value.detach(), owned.tensor
    if part.shape == param.shape:
        start, stop = owned.piece.param_span
        part = part.reshape(-1)[start:stop].reshape(piece.shape).to(piece.device)
    # As torch does on loading: counters keep their dtype, the rest takes that of the parameter.
    if key != "step" and part.is_floating_point():
        part = part.to(piece.dtype)
    return part.clone()


def load(opt: Sharded, state_dict: Mapping[str, Any]) -> None:
    """Load the whole state into the shards of this rank; changes nothing if it does not fit."""
    param_of = _fit(opt, state_dict)
    _forget(opt)
    distribute(opt, {param_of[index]: values for index, values in state_dict["state"].items()})
    _take_options(opt, state_dict["param_groups"])


def share(
    opt: Sharded, loaded: Mapping[str, Any] | None, collectives: TorchCollectives
) -> None:
    """Load on all other ranks what the first one has loaded, one tensor at a time. Collective.

    Args:
        loaded: The whole state, on the first rank; None on all others.
    """
    name = f"{opt.prefix}/restored"
    outline = None if loaded is None else _outline(loaded)
    outline = collectives.broadcast_pickled(outline, name=name)
    if loaded is None:
        param_of = _fit(opt, outline)
        _forget(opt)
    for index, values in outline["state"].items():
        whole = dict(values) if loaded is None else dict(loaded["state"][index])
        for key in (k for k, v in values.items() if isinstance(v, torch.Tensor)):
            whole[key] = _broadcast(whole[key], collectives, f"{name}/{index}/{key}")
        if loaded is None:
            distribute(opt, {param_of[index]: whole})
    if loaded is None:
        _take_options(opt, outline["param_groups"])


def _outline(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same with tensors that have a shape and a dtype, but no values."""
    states = {
        index: {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        for index, values in state_dict["state"].items()
    }
    return {"state": states, "param_groups": state_dict["param_groups"]}


def _broadcast(x: torch.Tensor, collectives: TorchCollectives, name: str) -> torch.Tensor:
    """The first rank's tensor, on the host; the others give one of its shape and dtype."""
    if x.is_meta:
        x = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    x = x.detach().cpu().contiguous()
    if x.numel():
        collectives.broadcast_in_place(x.view(-1), name=name)
    return x


def as_loaded(opt: Held, states: Mapping[torch.nn.Parameter, State]) -> dict[str, Any]:
    """States by parameter, with the optimizer's options, as a state_dict that shares memory."""
    params = [p for group in opt.groups for p in group]
    number = {p: i for i, p in enumerate(params)}
    groups = _options(opt, number)
    return {"state": {number[p]: v for p, v in states.items()}, "param_groups": groups}


def _fit(opt: Sharded, state_dict: Mapping[str, Any]) -> dict[int, torch.nn.Parameter]:
    """The parameter of every index in a state_dict; raise if that is of another optimizer."""
    groups = state_dict["param_groups"]
    _check_groups(opt, groups)
    params = [p for group in opt.groups for p in group]
    indices = [i for group in groups for i in group["params"]]
    param_of = dict(zip(indices, params, strict=True))
    group_of = {i: number for number, group in enumerate(groups) for i in group["params"]}
    options = zip(opt.inner.param_groups, groups, strict=True)
    expected = Expectations(opt.inner, [{**held, **loaded} for held, loaded in options])
    for index, values in state_dict["state"].items():
        if index not in param_of:
            raise ValueError(f"the state of parameter {index} belongs to no parameter group")
        _check_values(opt, expected, group_of[index], param_of[index], values)
    return param_of


def _forget(opt: Held) -> None:
    opt.inner.state.clear()
    opt.unsharded.clear()


def _take_options(opt: Held, groups: Sequence[Mapping[str, Any]]) -> None:
    for held, loaded in zip(opt.inner.param_groups, groups, strict=True):
        held.update({k: copy.deepcopy(v) for k, v in loaded.items() if k != "params"})
    # What torch does after loading: states of older versions become those of this one.
    opt.inner.__setstate__({"state": opt.inner.state, "param_groups": opt.inner.param_groups})


def distribute(opt: Sharded, states: Mapping[torch.nn.Parameter, State]) -> None:
    """Give this rank's pieces their parts of whole states; keep what belongs to no piece yet."""
    for section in opt.sections:
        for owned in section.owned:
            param = section.params[owned.piece.param]
            if param in states:
                opt.inner.state[owned.tensor] = {
                    key: _cut(key, value, owned, param) for key, value in states[param].items()
                }
    sharded = opt.sharded_params()
    for param, values in states.items():
        if values and param not in sharded:
            opt.unsharded[param] = copy.deepcopy(dict(values))


def _check_groups(opt: Sharded, groups: Sequence[Mapping[str, Any]]) -> None:
    ours = [len(g) for g in opt.groups]
    theirs = [len(g["params"]) for g in groups]
    if ours != theirs:
        raise ValueError(
            f"the state has parameter groups of {theirs} parameters, this optimizer of {ours}; "
            "load it into an optimizer made for the same model and groups"
        )


def _check_values(
    opt: Sharded, expected: Expectations, group: int, param: torch.nn.Parameter, values: State
) -> None:
    """Raise unless the state fits: fused kernels take the shapes of state for granted."""
    name, shape = opt.named[param].name, tuple(param.shape)
    if not isinstance(values, Mapping):
        raise TypeError(f"the state of {name!r} is a {type(values).__name__}, not a dict")
    expected.check(values, name, group, shape, param.dtype)
    if opt.config.partition == "parameter" or opt.config.stage == 0:
        return
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != param.shape:
            raise ValueError(
                f"the state {key!r} of {name!r} has shape {tuple(value.shape)}, the parameter "
                f"{shape}: it was saved for another model, or by an optimizer that "
                "needs partition='parameter'"
            )


# -- from sharded to whole ---------------------------------------------------------------------


def consolidate(opt: Held, collectives: core.Carries, to: int | None) -> dict[str, Any]:
    """The plain optimizer's state_dict, collected bucket by bucket on rank `to`, or everywhere."""
    core.check_destination(to, collectives.size)
    here = to is None or to == collectives.rank
    states: dict[torch.nn.Parameter, State] = {
        param: copy.deepcopy(values) for param, values in opt.unsharded.items()
    }
    for section in opt.sections:
        whole = core.collect_state(
            collectives,
            section.layout,
            _held(opt, section),
            _StateArrays(section),
            to=to,
            prefix=opt.prefix,
        )
        states.update((section.params[index], values) for index, values in whole.items())
    params = [p for group in opt.groups for p in group]
    number = {p: i for i, p in enumerate(params)}
    groups = _options(opt, number)
    state = {number[p]: states[p] for p in params if p in states} if here else {}
    return {"state": state, "param_groups": groups}


def _options(opt: Held, number: Mapping[torch.nn.Parameter, int]) -> list[dict[str, Any]]:
    groups = []
    for held, members in zip(opt.inner.param_groups, opt.groups, strict=True):
        options = {k: copy.deepcopy(v) for k, v in held.items() if k != "params"}
        groups.append({**options, "params": [number[p] for p in members]})
    return groups


def _held(opt: Held, section: Section) -> Iterator[core.PieceValue]:
    """What the inner optimizer keeps for this rank's pieces."""
    for owned in section.owned:
        for key, value in opt.inner.state.get(owned.tensor, {}).items():
            if not isinstance(value, torch.Tensor):
                yield core.PieceValue(owned.piece, key, core.VALUE, "", value)
                continue
            dtype = arrays.dtype_name(value)
            if value.shape == owned.tensor.shape:
                yield core.PieceValue(owned.piece, key, core.ELEMENT, dtype, None, value)
            elif value.dim() == 0:
                yield core.PieceValue(owned.piece, key, core.SCALAR, dtype, value.item())
            else:
                shape = list(value.shape)
                yield core.PieceValue(owned.piece, key, core.TENSOR, dtype, shape, value)


class _StateArrays:
    """torch's tensors, for the core; see `core.StateArrays`."""

    def __init__(self, section: Section) -> None:
        self._flats = section.flat.flats

    def zeros(self, length: int, dtype: str, bucket: int) -> torch.Tensor:
        device = self._flats[bucket].device
        return torch.zeros(length, dtype=arrays.dtype_of(dtype), device=device)

    def flatten(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().reshape(-1)

    def to_wire(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        return x.cpu()

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=arrays.dtype_of(dtype), device="cpu")

    def scalar(self, value: Any, dtype: str) -> torch.Tensor:
        return torch.tensor(value, dtype=arrays.dtype_of(dtype), device="cpu")
