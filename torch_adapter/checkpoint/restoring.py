"""From a checkpoint, or a plain file of weights, into a model and its optimizer.

Everything is read, and checked as it passes, into memory that nobody uses yet. When all ranks have
done so without complaint, optimizer state takes the place of what was there, and parameters are
copied to theirs. So no byte is read twice and nothing is ever half-loaded, for memory as large as
this rank's shards while it lasts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zerohvd.checkpoint import TensorInfo, Want
from zerohvd.checkpoint.loading import OWN, refuse_names
from zerohvd.checkpoint.tree import decode
from zerohvd.layout import Span
from zerohvd.torch.checkpoint.holdings import Held, Holdings
from zerohvd.torch.checkpoint.storing import BUFFER, MASTER, PARAM, STATE, own_buffer
from zerohvd.torch.checkpoint.tensors import destination
from zerohvd.torch.communication import arrays
from zerohvd.torch.optimizer.offload import Offload
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer


class Plan:
    """What to read, and what to do with it afterwards.

    Args:
        held: Of the model.
        tensors: What there is to read.
        strict: Whether names must match exactly.
    """

    def __init__(
        self, held: Holdings, tensors: Mapping[str, TensorInfo], *, strict: bool = True
    ) -> None:
        self.held, self.tensors, self._strict = held, tensors, strict
        self.wants: list[Want] = []
        self._after: list[Callable[[], None]] = []
        self._offload: Offload | None = None if held.opt is None else held.opt.offload

    def apply(self) -> None:
        """What was read takes effect, and what it took meanwhile is given back piece by piece."""
        self.wants.clear()
        self._after.reverse()
        while self._after:
            self._after.pop()()

    def _staged(self, info: TensorInfo, span: Span, dtype: torch.dtype) -> torch.Tensor:
        """1-D memory that a stored range is going to be read to."""
        if self._offload is not None and self._offload.on_disk:
            staged = self._offload.scratch(span.length, dtype)
        else:
            staged = torch.empty(span.length, dtype=dtype)
        self.wants.append(Want(info.key, span, destination(staged, info.dtype)))
        return staged

    def _into(self, info: TensorInfo, span: Span, target: torch.Tensor) -> None:
        """A stored range is going to be in `target`, of whatever strides and device."""
        staged = self._staged(info, span, target.dtype)

        def put() -> None:
            target.detach().copy_(staged.view(target.shape))

        self._after.append(put)

    # -- the model --------------------------------------------------------------------------------

    def weights(self, aliases: Mapping[str, str], rank: int, size: int | None) -> None:
        """Parameters and buffers.

        Args:
            aliases: Other names of tied parameters, in the checkpoint.
            rank: This one.
            size: Number of ranks that have saved; None: a plain file.
        """
        self._aliases = aliases
        self._check_names(plain=size is None)
        for piece in self.held.pieces:
            self._piece(piece)
        for name, param in self.held.wholes.items():
            info = self._find(PARAM, name, tuple(param.shape), param.dtype)
            if info is not None:
                self._into(info, Span(0, param.numel()), param)
        for name, buffer in self.held.buffers.items():
            self._buffer(name, buffer, rank, size)

    def _check_names(self, *, plain: bool) -> None:
        kinds = (PARAM,) if plain else (PARAM, BUFFER)
        stored = {t.name for t in self.tensors.values() if t.kind in kinds} | {*self._aliases}
        wanted = {*self.held.params, *self.held.buffers}
        known = wanted | {*self.held.aliases}
        missing, unknown = sorted(wanted - stored), sorted(stored - known)
        for alias, first in self.held.aliases.items():
            if first in missing and alias in stored:
                missing.remove(first)
        if self._strict:
            refuse_names(missing, unknown)

    def _find(
        self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> TensorInfo | None:
        """The stored tensor for a name of the model; the finer one if there are two."""
        others = [a for a, first in self.held.aliases.items() if first == name]
        for candidate in (name, *others, self._aliases.get(name, name)):
            info = self.tensors.get(f"{kind}/{candidate}")
            if info is None:
                continue
            master = self.tensors.get(f"{MASTER}/{candidate}") if kind == PARAM else None
            if master is not None and arrays.dtype_name(dtype) != info.dtype:
                info = master
            if info.shape != shape:
                raise ValueError(
                    f"{name!r} has shape {info.shape} in the checkpoint, but {shape} in the model"
                )
            return info
        return None

    def _piece(self, piece: Held) -> None:
        target = piece.values if piece.master is None else piece.master
        info = self._find(PARAM, piece.name, piece.shape, target.dtype)
        if info is not None:
            self._into(info, piece.span, target)

    def _buffer(self, name: str, buffer: torch.Tensor, rank: int, size: int | None) -> None:
        if size == self.held.ranks:
            own = self.tensors.get(f"{OWN}/{own_buffer(name, rank)}")
            if own is not None and own.shape == tuple(buffer.shape):
                self._into(own, Span(0, buffer.numel()), buffer)
                return
        kind = PARAM if size is None else BUFFER
        info = self._find(kind, name, tuple(buffer.shape), buffer.dtype)
        if info is not None:
            self._into(info, Span(0, buffer.numel()), buffer)

    # -- the optimizer ----------------------------------------------------------------------------

    def optimizer(
        self,
        opt: ZeroOptimizer,
        groups: list[dict[str, Any]],
        values: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """The inner optimizer's state and options."""
        self._check_groups(opt, groups)
        keys = _keys_by_name(self.tensors)
        state: dict[Any, dict[str, Any]] = {}
        for piece in self.held.pieces:
            if piece.piece is None or (piece.name not in keys and piece.name not in values):
                continue
            new: dict[str, Any] = {}
            for key in keys.get(piece.name, ()):
                new[key] = self._state(opt, piece, key)
            new.update(_decode_values(values.get(piece.name, {}), opt, piece.piece))
            state[piece.piece] = new
        frozen = self._frozen(opt, keys, values)
        self._after.append(lambda: _put_state(opt, state, frozen, groups))

    def _check_groups(self, opt: ZeroOptimizer, groups: list[dict[str, Any]]) -> None:
        if len(groups) != len(opt.groups):
            raise ValueError(
                f"the checkpoint has {len(groups)} parameter groups, this optimizer "
                f"{len(opt.groups)}: make it with the same groups"
            )
        for number, (stored, members) in enumerate(zip(groups, opt.groups, strict=True)):
            names = {self.held.names[p] for p in members}
            differing = sorted(names ^ {self._name(n) for n in stored["params"]})
            if differing and self._strict:
                raise ValueError(
                    f"parameter group {number} has other members in the checkpoint than here; "
                    f"{differing[0]!r} is in one of them only"
                )

    def _name(self, stored: str) -> str:
        return self.held.aliases.get(stored, stored)

    def _state(self, opt: ZeroOptimizer, piece: Held, key: str) -> torch.Tensor:
        """What is going to be a piece's state."""
        assert piece.piece is not None
        info = self.tensors[f"{STATE}{key}/{piece.name}"]
        elementwise = info.shape == piece.shape
        if not elementwise and not piece.whole:
            raise ValueError(
                f"the state {key!r} of {piece.name!r} has shape {info.shape} in the checkpoint, "
                f"the parameter {piece.shape}: load it into an optimizer with "
                'partition="parameter"'
            )
        shape = piece.piece.shape if elementwise else info.shape
        dtype = self._state_dtype(info, key, piece)
        span = piece.span if elementwise else Span(0, info.numel)
        present = opt.inner.state.get(piece.piece, {}).get(key)
        fits = (
            isinstance(present, torch.Tensor)
            and (tuple(present.shape), present.dtype) == (tuple(shape), dtype)
        )
        in_file = fits and self._offload is not None and self._offload.holds(present)
        if piece.piece.device.type == "cpu" and not in_file:
            return self._staged(info, span, dtype).view(shape)
        value = present if fits else torch.empty(shape, dtype=dtype, device=piece.piece.device)
        self._into(info, span, value)
        return value

    def _state_dtype(self, info: TensorInfo, key: str, piece: Held) -> torch.dtype:
        """As stored, unless the optimizer updates another dtype now than it did then."""
        assert piece.piece is not None
        dtype = arrays.dtype_of(info.dtype)
        param = self.tensors.get(f"{PARAM}/{piece.name}")
        updated = self.tensors.get(f"{MASTER}/{piece.name}", param)
        same = updated is not None and updated.dtype == arrays.dtype_name(piece.piece)
        if same or key == "step" or not dtype.is_floating_point:
            return dtype
        return piece.piece.dtype

    def _frozen(
        self,
        opt: ZeroOptimizer,
        keys: Mapping[str, Iterable[str]],
        values: Mapping[str, Mapping[str, Any]],
    ) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """The state of parameters of the optimizer that are not sharded here: frozen ones."""
        sharded = {p for section in opt.sections for p in section.params}
        found: dict[torch.nn.Parameter, dict[str, Any]] = {}
        for param in opt.all_params():
            name = self.held.names[param]
            if param in sharded or (name not in keys and name not in values):
                continue
            new = {}
            for key in keys.get(name, ()):
                info = self.tensors[f"{STATE}{key}/{name}"]
                staged = self._staged(info, Span(0, info.numel), arrays.dtype_of(info.dtype))
                new[key] = staged.view(info.shape)
            new.update(_decode_values(values.get(name, {}), opt, param))
            found[param] = new
        return found


def _keys_by_name(tensors: Mapping[str, TensorInfo]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for info in tensors.values():
        if info.kind.startswith(STATE):
            found.setdefault(info.name, []).append(info.kind.removeprefix(STATE))
    return found


def _decode_values(
    stored: Mapping[str, Any], opt: ZeroOptimizer, param: torch.Tensor
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, (dtype, encoded) in stored.items():
        value = decode(encoded, lambda name, of: None)
        if dtype:
            value = torch.tensor(value, dtype=arrays.dtype_of(dtype))
            if any(g.get("capturable") or g.get("fused") for g in opt.inner.param_groups):
                value = value.to(param.device)
        found[key] = value
    return found


def _put_state(
    opt: ZeroOptimizer,
    state: dict[Any, dict[str, Any]],
    frozen: dict[torch.nn.Parameter, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    opt.inner.state.clear()
    opt.inner.state.update(state)
    opt.unsharded.clear()
    opt.unsharded.update(frozen)
    for held, loaded in zip(opt.inner.param_groups, groups, strict=True):
        held.update(copy.deepcopy(loaded["options"]))
    # What torch does after loading: states of older versions become those of this one.
    opt.inner.__setstate__({"state": opt.inner.state, "param_groups": opt.inner.param_groups})
