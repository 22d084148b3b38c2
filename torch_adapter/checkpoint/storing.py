"""From a model and its optimizer to what a checkpoint stores."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zerohvd.checkpoint import Content, Entry, encode, loading, share_out, whole
from zerohvd.checkpoint.loading import OWN, SHARED
from zerohvd.checkpoint.tree import Array
from zerohvd.torch.checkpoint import accumulation, rng
from zerohvd.torch.checkpoint.holdings import Held, Holdings
from zerohvd.torch.checkpoint.tensors import entry, raw, to_array, whole_entry
from zerohvd.torch.communication import arrays
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer

# Kinds of tensors; an optimizer's are "state.<key>".
PARAM, MASTER, BUFFER = "param", "master", "buffer"
STATE = "state."


def content(
    held: Holdings,
    opt: ZeroOptimizer | None,
    *,
    shared: Mapping[str, Any],
    step: int | None,
    buffer_sums: list[list[int]],
    rank: int,
) -> Content:
    """What this rank stores.

    Args:
        held: Of the model.
        opt: The optimizer whose state is stored too.
        shared: What all ranks have alike: extra, schedulers, scaler.
        step: Of the training.
        buffer_sums: Of every rank, the checksums of its buffers.
        rank: This one.
    """
    size = len(buffer_sums)
    made = Content("torch", step=step)
    pieces = [e for piece in held.pieces for e in _weights(piece)]
    if opt is not None:
        for piece in held.pieces:
            pieces += _states(opt, piece)
            if piece.piece is not None and piece.span.start == 0:
                values = _values(opt.inner.state.get(piece.piece, {}), piece.name)
                if values and (rank == 0 or not held.replicated):
                    made.values[piece.name] = values
    made.entries += share_out(pieces, rank, size) if held.replicated else pieces
    rest = [whole_entry(PARAM, name, tensor) for name, tensor in held.wholes.items()]
    if opt is not None:
        rest += _unsharded(opt, held, made, rank)
    made.entries += share_out(rest, rank, size, uncut=True)
    made.entries += _buffers(held, buffer_sums, rank)
    _describe(made, held, opt, shared, rank)
    return made


def _weights(held: Held) -> Iterator[Entry]:
    yield entry(PARAM, held.name, held.shape, held.span, held.values)
    if held.master is not None:
        yield entry(MASTER, held.name, held.shape, held.span, held.master)


def _states(opt: ZeroOptimizer, held: Held) -> Iterator[Entry]:
    """The state tensors of a piece: of the parameter's shape, or of one of their own."""
    values = {} if held.piece is None else opt.inner.state.get(held.piece, {})
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or _is_scalar(value, held):
            continue
        kind = state_kind(key)
        assert held.piece is not None
        if value.shape == held.piece.shape:
            yield entry(kind, held.name, held.shape, held.span, value)
        elif held.whole:
            yield whole_entry(kind, held.name, value)
        else:
            raise ValueError(
                f"the state {key!r} of {held.name!r} has shape {tuple(value.shape)} for a piece of "
                f"shape {tuple(held.piece.shape)}: it cannot be put together again. Use "
                'partition="parameter" with this optimizer'
            )


def _is_scalar(value: torch.Tensor, held: Held) -> bool:
    return value.dim() == 0 and held.shape != ()


def state_kind(key: Any) -> str:
    if not isinstance(key, str) or "/" in key:
        raise TypeError(f"the optimizer calls a state {key!r}; a name without slashes is needed")
    return f"{STATE}{key}"


def _values(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """State that is no array: counters and the like, as [dtype of a tensor or "", value]."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                number = encode(value.item(), f"{name}.{key}", {})
                found[key] = [arrays.dtype_name(value), number]
        else:
            beside: dict[str, Array] = {}
            found[key] = ["", encode(value, f"the state {key!r} of {name!r}", beside, to_array)]
            if beside:
                raise TypeError(f"the state {key!r} of {name!r} hides tensors in a container")
    return found


def _unsharded(opt: ZeroOptimizer, held: Holdings, made: Content, rank: int) -> list[Entry]:
    """The state of parameters that are frozen now."""
    entries = []
    for param, state in opt.unsharded.items():
        name = held.names[param]
        entries += [
            whole_entry(state_kind(k), name, v)
            for k, v in state.items()
            if isinstance(v, torch.Tensor) and v.dim() > 0
        ]
        if rank == 0:
            made.values[name] = _values(state, name)
    return entries


# -- buffers: statistics that each rank has gathered from its own data -----------------------------


def buffer_sums(held: Holdings) -> list[int]:
    return [zlib.crc32(raw(b.cpu())) for b in held.buffers.values()]


def own_buffer(name: str, rank: int) -> str:
    return f"{name}@{rank}"


def _buffers(held: Holdings, sums: list[list[int]], rank: int) -> Iterator[Entry]:
    """Rank 0's, and those of other ranks that differ from them."""
    for index, (name, buffer) in enumerate(held.buffers.items()):
        if rank == 0:
            yield whole_entry(BUFFER, name, buffer)
        elif sums[rank][index] != sums[0][index]:
            yield whole_entry(OWN, own_buffer(name, rank), buffer)


# -- what is no array ------------------------------------------------------------------------------


def _describe(
    made: Content,
    held: Holdings,
    opt: ZeroOptimizer | None,
    shared: Mapping[str, Any],
    rank: int,
) -> None:
    beside: dict[str, Array] = {}
    own: dict[str, Array] = {}
    modules = {n: m.get_extra_state() for n, m in held.modules_with_extra_state()}
    state = {"aliases": held.aliases, "modules": modules, **shared}
    rank_state: dict[str, Any] = {"rng": rng.states()}
    if opt is not None:
        made.config = {**opt.settings(), "size": opt.collectives.size}
        state["optimizer"] = type(opt.inner).__name__
        state["groups"] = groups(opt, held)
        state["progress"] = accumulation.progress(opt, held)
        made.entries += accumulation.entries(opt, held, rank)
    made.state = encode(state, "state", beside, to_array)
    made.rank_state = encode(rank_state, f"rank{rank}", own, to_array)
    if rank == 0:
        made.entries += [whole(SHARED, name, array) for name, array in beside.items()]
    made.entries += [whole(OWN, name, array) for name, array in own.items()]


def groups(opt: ZeroOptimizer, held: Holdings) -> list[dict[str, Any]]:
    """The parameter groups: the names of their members, and their options."""
    return [
        {
            "params": [held.names[p] for p in members],
            "options": {k: v for k, v in group.items() if k not in ("params", "param_names")},
        }
        for group, members in zip(opt.inner.param_groups, opt.groups, strict=True)
    ]


def training_step(opt: ZeroOptimizer | None, extra: Any, step: int | None) -> int | None:
    """As in the core; the optimizer counts the steps of every parameter."""

    def counted() -> int | None:
        values = [] if opt is None else opt.inner.state.values()
        counts = [float(s["step"]) for s in values if "step" in s]
        return int(max(counts)) if counts else None

    return loading.training_step(extra, step, counted)
