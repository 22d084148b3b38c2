"""The inner optimizer's state: whole and by parameter outside, sharded inside."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from zerohvd.config import ZeroConfig
from zerohvd.layout import Bucket, Span
from zerohvd.torch.communication import arrays
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.gradients.section import Section
from zerohvd.torch.params.owned import NamedParam

State = dict[str, Any]


class Sharded(Protocol):
    """A sharded optimizer, as far as its state is concerned; see ZeroOptimizer."""

    inner: torch.optim.Optimizer
    config: ZeroConfig
    collectives: TorchCollectives | LocalCollectives
    groups: list[list[torch.nn.Parameter]]
    named: dict[torch.nn.Parameter, NamedParam]
    unsharded: dict[torch.nn.Parameter, State]
    prefix: str

    @property
    def sections(self) -> Sequence[Section]: ...

    def sharded_params(self) -> set[torch.nn.Parameter]: ...


@dataclasses.dataclass(frozen=True)
class PieceState:
    """Where a part of a parameter's state goes."""

    span: Span  # inside the flattened parameter
    tensor: torch.nn.Parameter


# -- from whole to sharded ---------------------------------------------------------------------


def detach_state(inner: torch.optim.Optimizer) -> dict[Any, State]:
    """Take the state out of an optimizer that is about to be sharded."""
    held = {p: dict(values) for p, values in inner.state.items()}
    inner.state.clear()
    return held


def shard_into(
    inner: torch.optim.Optimizer,
    pieces: Iterable[PieceState],
    values: Mapping[str, Any],
    param: torch.nn.Parameter,
) -> None:
    """Give each piece its part of a parameter's state."""
    for piece in pieces:
        inner.state[piece.tensor] = {
            key: _cut(key, value, piece, param) for key, value in values.items()
        }


def _cut(key: str, value: Any, piece: PieceState, param: torch.nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    if value.shape == param.shape:
        part = value.reshape(-1)[piece.span.start : piece.span.stop]
        part = part.reshape(piece.tensor.shape).to(piece.tensor.device)
    else:
        part = value
    # As torch does on loading: counters keep their dtype, the rest takes that of the parameter.
    if key != "step" and part.is_floating_point():
        part = part.to(piece.tensor.dtype)
    return part.clone()


def load(opt: Sharded, state_dict: Mapping[str, Any]) -> None:
    """Load the whole state into the shards of this rank; changes nothing if it does not fit."""
    groups = state_dict["param_groups"]
    _check_groups(opt, groups)
    params = [p for group in opt.groups for p in group]
    indices = [i for group in groups for i in group["params"]]
    param_of = dict(zip(indices, params, strict=True))
    for index, values in state_dict["state"].items():
        if index not in param_of:
            raise ValueError(f"the state of parameter {index} belongs to no parameter group")
        _check_values(opt, param_of[index], values)
    opt.inner.state.clear()
    opt.unsharded.clear()
    distribute(opt, {param_of[index]: values for index, values in state_dict["state"].items()})
    for held, loaded in zip(opt.inner.param_groups, groups, strict=True):
        held.update({k: copy.deepcopy(v) for k, v in loaded.items() if k != "params"})
    # What torch does after loading: states of older versions become those of this one.
    opt.inner.__setstate__({"state": opt.inner.state, "param_groups": opt.inner.param_groups})


def distribute(opt: Sharded, states: Mapping[torch.nn.Parameter, State]) -> None:
    """Give this rank's pieces their parts of whole states; keep what belongs to no piece yet."""
    pieces = _pieces_by_param(opt)
    sharded = opt.sharded_params()
    for param, values in states.items():
        if param in sharded:
            shard_into(opt.inner, pieces.get(param, ()), values, param)
        elif values:
            opt.unsharded[param] = copy.deepcopy(dict(values))


def _pieces_by_param(opt: Sharded) -> dict[torch.nn.Parameter, list[PieceState]]:
    found: dict[torch.nn.Parameter, list[PieceState]] = {}
    for section in opt.sections:
        for owned in section.owned:
            param = section.params[owned.piece.param]
            piece = PieceState(owned.piece.param_span, owned.tensor)
            found.setdefault(param, []).append(piece)
    return found


def _check_groups(opt: Sharded, groups: Sequence[Mapping[str, Any]]) -> None:
    ours = [len(g) for g in opt.groups]
    theirs = [len(g["params"]) for g in groups]
    if ours != theirs:
        raise ValueError(
            f"the state has parameter groups of {theirs} parameters, this optimizer of {ours}; "
            "load it into an optimizer made for the same model and groups"
        )


def _check_values(opt: Sharded, param: torch.nn.Parameter, values: State) -> None:
    whole = opt.config.partition == "parameter" or opt.config.stage == 0
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or whole:
            continue
        if value.shape != param.shape:
            name = opt.named[param].name
            raise ValueError(
                f"the state {key!r} of {name!r} has shape {tuple(value.shape)}, the parameter "
                f"{tuple(param.shape)}: it was saved for another model, or by an optimizer that "
                "needs partition='parameter'"
            )


# -- from sharded to whole ---------------------------------------------------------------------


def consolidate(opt: Sharded, to: int | None) -> dict[str, Any]:
    """The plain optimizer's state_dict, collected bucket by bucket on rank `to`, or everywhere."""
    size = opt.collectives.size
    if to is not None and not 0 <= to < size:
        raise ValueError(f"to must be a rank in [0, {size}) or None, got {to!r}")
    here = to is None or to == opt.collectives.rank
    states: dict[torch.nn.Parameter, State] = {
        param: copy.deepcopy(values) for param, values in opt.unsharded.items()
    }
    for section in opt.sections:
        for index, values in _collect(opt, section, to).items():
            states[section.params[index]] = values
    params = [p for group in opt.groups for p in group]
    number = {p: i for i, p in enumerate(params)}
    groups = []
    for held, members in zip(opt.inner.param_groups, opt.groups, strict=True):
        options = {k: copy.deepcopy(v) for k, v in held.items() if k != "params"}
        groups.append({**options, "params": [number[p] for p in members]})
    state = {number[p]: states[p] for p in params if p in states} if here else {}
    return {"state": state, "param_groups": groups}


def _collect(opt: Sharded, section: Section, to: int | None) -> dict[int, State]:
    """Per parameter index: its whole state."""
    everyone: list[Any] = [_describe(opt, section)]
    if section.layout.size > 1:
        everyone = opt.collectives.allgather_object(everyone[0], name=f"{opt.prefix}/state/keys")
    for one in everyone:
        if isinstance(one, str):
            raise TypeError(one)  # on every rank alike
    # JSON has turned the indices into strings.
    known: dict[int, dict[str, list[Any]]] = {}
    for one in everyone:
        for index, keys in one.items():
            known.setdefault(int(index), {}).update(keys)
    collected: dict[int, State] = {i: {} for i in sorted(known)}
    for index, keys in known.items():
        for key, (kind, value, dtype) in keys.items():
            if kind == "value":
                collected[index][key] = value
            elif kind == "scalar":
                collected[index][key] = torch.tensor(value, dtype=arrays.dtype_of(dtype))
    gather = _Gather(opt, section, to, known, collected)
    for bucket in section.layout.buckets:
        gather.elementwise(bucket)
    gather.whole_tensors()
    order = {i: list(keys) for i, keys in known.items()}
    return {i: {k: v[k] for k in order[i] if k in v} for i, v in collected.items()}


def _describe(opt: Sharded, section: Section) -> dict[str, dict[str, list[Any]]] | str:
    """What this rank holds, as JSON can say it: parameter -> key -> [kind, value, dtype].

    A string says what cannot be said, for all ranks to raise.
    """
    held: dict[str, dict[str, list[Any]]] = {}
    for owned in section.owned:
        values = opt.inner.state.get(owned.tensor)
        if not values:
            continue
        keys = held.setdefault(str(owned.piece.param), {})
        for key, value in values.items():
            keys[key] = _describe_value(value, owned.tensor)
            if keys[key][0] == "value" and not _is_json(value):
                name = section.named[owned.piece.param].name
                return (
                    f"the state {key!r} of {name!r} is a {type(value).__name__} that cannot be "
                    "collected: tensors, numbers, strings, and lists of them can"
                )
    return held


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _describe_value(value: Any, piece: torch.Tensor) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return ["value", value, ""]
    dtype = arrays.dtype_name(value)
    if value.shape == piece.shape:
        return ["element", None, dtype]
    if value.dim() == 0:
        return ["scalar", value.item(), dtype]
    return ["tensor", list(value.shape), dtype]


class _Gather:
    """Collects state tensors where they are wanted, one bucket at a time."""

    def __init__(
        self,
        opt: Sharded,
        section: Section,
        to: int | None,
        known: dict[int, dict[str, list[Any]]],
        collected: dict[int, State],
    ) -> None:
        self._opt, self._section, self._to = opt, section, to
        self._known, self._collected = known, collected
        self._here = to is None or to == opt.collectives.rank
        self._pieces = {(o.piece.param, o.piece.bucket): o for o in section.owned}

    def elementwise(self, bucket: Bucket) -> None:
        """State tensors of the parameter's own shape: one flat tensor per key and dtype."""
        kinds = {
            (key, dtype): None
            for slot in bucket.slots
            for key, (kind, _, dtype) in self._known.get(slot.param, {}).items()
            if kind == "element"
        }
        for key, dtype in kinds:
            shard = self._shard(bucket, key, dtype)
            full = self._gather(shard, f"b{bucket.index}/{key}")
            if self._here:
                self._spread(bucket, key, dtype, full.cpu())

    def _shard(self, bucket: Bucket, key: str, dtype: str) -> torch.Tensor:
        span = bucket.span(self._section.rank)
        flat = self._section.flat.flats[bucket.index]
        shard = torch.zeros(span.length, dtype=arrays.dtype_of(dtype), device=flat.device)
        for slot in bucket.slots:
            owned = self._pieces.get((slot.param, bucket.index))
            value = None if owned is None else self._opt.inner.state[owned.tensor].get(key)
            if owned is None or not isinstance(value, torch.Tensor):
                continue
            start = owned.piece.bucket_span.start - span.start
            shard[start : start + value.numel()] = value.reshape(-1)
        return shard

    def _spread(self, bucket: Bucket, key: str, dtype: str, full: torch.Tensor) -> None:
        for slot in bucket.slots:
            described = self._known.get(slot.param, {}).get(key)
            if described is None or described[0] != "element" or described[2] != dtype:
                continue
            shape = self._section.params[slot.param].shape
            values = self._collected[slot.param]
            if key not in values:
                values[key] = torch.empty(shape, dtype=full.dtype)
            target = values[key].view(-1)[slot.param_start : slot.param_start + slot.length]
            target.copy_(full[slot.start : slot.start + slot.length])

    def whole_tensors(self) -> None:
        """State tensors of another shape, which only whole parameters have: one by one."""
        for index, keys in self._known.items():
            for key, (kind, shape, dtype) in keys.items():
                if kind != "tensor":
                    continue
                bucket = self._section.layout.slots_of[index][0][0]
                owned = self._pieces.get((index, bucket))
                part = torch.empty(0, dtype=arrays.dtype_of(dtype))
                if owned is not None:
                    part = self._opt.inner.state[owned.tensor][key].detach().reshape(-1)
                full = self._gather(part, f"p{index}/{key}")
                if self._here:
                    self._collected[index][key] = full.cpu().reshape(shape)

    def _gather(self, part: torch.Tensor, name: str) -> torch.Tensor:
        if self._section.layout.size == 1:
            return part
        collectives = self._opt.collectives
        name = f"{self._opt.prefix}/state/{name}"
        if self._to is None:
            gathered: torch.Tensor = collectives.allgather(part, name=name)
        else:
            splits = [0] * collectives.size
            splits[self._to] = part.numel()
            gathered = collectives.alltoall(part, splits, name=name)
        return gathered
