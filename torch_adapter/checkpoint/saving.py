"""What this rank stores of a model and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zerohvd.checkpoint.entries import Entry
from zerohvd.checkpoint.matching import BUFFER, MASTER, PARAM, state_kind
from zerohvd.checkpoint.values import generators
from zerohvd.checkpoint.values.tree import Array, encode
from zerohvd.torch.checkpoint import accumulation
from zerohvd.torch.checkpoint.holdings import HeldPiece, Holdings
from zerohvd.torch.checkpoint.tensors import entry, to_array, whole_entry
from zerohvd.torch.communication import arrays
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer


class TorchSnapshot:
    """Implements `zerohvd.checkpoint.session.Snapshot`.

    Args:
        held: Of the model.
        opt: The optimizer whose state is stored too.
        given: States of schedulers and scaler.
    """

    def __init__(
        self, held: Holdings, opt: ZeroOptimizer | None, given: dict[str, Any]
    ) -> None:
        self._held, self._opt, self._given = held, opt, given
        self.replicated = held.replicated
        for section in held.sections:
            section.refresh_masters(section.buckets)

    def pieces(self) -> Iterator[Entry]:
        for piece in self._held.pieces:
            yield entry(PARAM, piece.name, piece.shape, piece.span, piece.values)
            if piece.master is not None:
                yield entry(MASTER, piece.name, piece.shape, piece.span, piece.master)
            if self._opt is not None:
                yield from _states(piece, self._state_of(piece))
        if self._opt is not None:
            yield from accumulation.reduced_entries(self._opt, self._held)

    def _state_of(self, piece: HeldPiece) -> Mapping[str, Any]:
        if self._opt is None or piece.param is None:
            return {}
        found: Mapping[str, Any] = self._opt.inner.state.get(piece.param, {})
        return found

    def copies(self) -> Iterator[Entry]:
        for name, param in self._held.wholes.items():
            yield whole_entry(PARAM, name, param)
        for param, state in {} if self._opt is None else self._opt.unsharded.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    yield whole_entry(state_kind(key), self._held.names[param], value)

    def variants(self) -> Iterator[Entry]:
        for name, buffer in self._held.buffers.items():
            yield whole_entry(BUFFER, name, buffer)

    def own(self, rank: int) -> Iterator[Entry]:
        if self._opt is not None:
            yield from accumulation.local_entries(self._opt, self._held, rank)

    def values(self, rank: int) -> dict[str, dict[str, Any]]:
        found = {}
        if self._opt is not None and (rank == 0 or not self.replicated):
            for piece in self._held.pieces:
                values = _values(self._state_of(piece), piece.name) if not piece.span.start else {}
                if values:
                    found[piece.name] = values
        if self._opt is not None and rank == 0:
            for param, state in self._opt.unsharded.items():
                name = self._held.names[param]
                found[name] = _values(state, name)
        return found

    def config(self) -> dict[str, Any]:
        if self._opt is None:
            return {}
        return {**self._opt.settings(), "size": self._opt.collectives.size}

    def given(self) -> dict[str, Any]:
        return self._given

    def state(self) -> dict[str, Any]:
        modules = {n: m.get_extra_state() for n, m in self._held.modules_with_extra_state()}
        state: dict[str, Any] = {"aliases": self._held.aliases, "modules": modules}
        if self._opt is not None:
            state["optimizer"] = type(self._opt.inner).__name__
            state["groups"] = _groups(self._opt, self._held)
            state["progress"] = accumulation.progress(self._opt, self._held)
        return state

    def generators(self) -> dict[str, Any]:
        found = {**generators.states(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state()
        return found

    def counted_steps(self) -> int | None:
        """As the optimizer counts them, for every parameter."""
        values = [] if self._opt is None else self._opt.inner.state.values()
        counts = [float(s["step"]) for s in values if "step" in s]
        return int(max(counts)) if counts else None


def _states(held: HeldPiece, state: Mapping[str, Any]) -> Iterator[Entry]:
    """The state tensors of a piece: of the parameter's shape, or of one of their own."""
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and held.shape != ()):
            continue
        assert held.param is not None
        if value.shape == held.param.shape:
            yield entry(state_kind(key), held.name, held.shape, held.span, value)
        elif held.whole:
            yield whole_entry(state_kind(key), held.name, value)
        else:
            raise ValueError(
                f"the state {key!r} of {held.name!r} has shape {tuple(value.shape)} for a piece of "
                f"shape {tuple(held.param.shape)}: it cannot be put together again. Use "
                'partition="parameter" with this optimizer'
            )


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


def _groups(opt: ZeroOptimizer, held: Holdings) -> list[dict[str, Any]]:
    """The parameter groups: the names of their members, and their options."""
    return [
        {
            "params": [held.names[p] for p in members],
            "options": {k: v for k, v in group.items() if k not in ("params", "param_names")},
        }
        for group, members in zip(opt.inner.param_groups, opt.groups, strict=True)
    ]
