"""From a checkpoint, or a plain file of weights, into a model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zerohvd.checkpoint import CheckpointMismatchError, session
from zerohvd.checkpoint.matching import LoadPlan, Matching, Names, Slot, state_span
from zerohvd.checkpoint.reader import ArraySource
from zerohvd.checkpoint.values import generators
from zerohvd.checkpoint.values.likeness import check_finite, check_state
from zerohvd.layout import Span
from zerohvd.torch.checkpoint.accumulation import Resumption
from zerohvd.torch.checkpoint.holdings import HeldPiece, Holdings
from zerohvd.torch.checkpoint.loaded import (
    LoadedState,
    check_groups,
    extra_state_change,
    state_change,
)
from zerohvd.torch.checkpoint.plain_files import TORCH_SUFFIXES, open_torch_file
from zerohvd.torch.checkpoint.tensors import TorchStaging
from zerohvd.torch.communication import arrays
from zerohvd.torch.compat import increment_version
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer

State = dict[str, Any]  # of one parameter


class TorchTarget:
    """Implements `zerohvd.checkpoint.session.Target`.

    Args:
        held: Of the model.
        opt: The optimizer whose state is loaded too.
        schedulers, scaler: That take over their states.
    """

    def __init__(
        self,
        held: Holdings,
        opt: ZeroOptimizer | None,
        schedulers: Sequence[Any] | None,
        scaler: Any,
    ) -> None:
        self._held, self._opt = held, opt
        self._schedulers, self._scaler = schedulers, scaler
        self._offload = None if held.opt is None else held.opt.offload
        self._resumption: Resumption | None = None
        self._loaded: LoadedState | None = None
        self.staging = TorchStaging(self._offload)

    def openers(self) -> Mapping[str, Callable[[Path], ArraySource]]:
        return dict.fromkeys(TORCH_SUFFIXES, open_torch_file)

    def names(self, stored: session.Stored) -> Names:
        return Names([*self._held.params, *self._held.buffers], self._held.aliases)

    def plan(self, plan: LoadPlan, stored: session.Stored, *, strict: bool) -> None:
        plan.weights(self._slots())
        self._check_others(stored.state)
        if self._opt is not None and "groups" not in stored.state and plan.matching.any_state():
            raise CheckpointMismatchError("it holds an optimizer's state, but not state.groups")
        if self._opt is not None and "groups" in stored.state:
            self._check_groups(self._opt, plan.matching, stored.state["groups"], strict=strict)
            self._plan_state(self._opt, plan, stored)
            if stored.state.get("progress") is not None:
                self._resumption = Resumption(self._opt, self._held, stored.state["progress"])
                self._resumption.plan(plan)

    # -- the model --------------------------------------------------------------------------------

    def _slots(self) -> Iterator[Slot]:
        for piece in self._held.pieces:
            target = piece.updated
            dtype = arrays.dtype_name(target)
            yield Slot(piece.name, piece.shape, piece.span, dtype, _copy_to(target))
        for name, param in self._held.wholes.items():
            yield _whole_slot(name, param)
        for name, buffer in self._held.buffers.items():
            yield _whole_slot(name, buffer, per_rank=True)

    def _check_others(self, state: Mapping[str, Any]) -> None:
        stored, given = state.get("schedulers", []), self._schedulers
        if not isinstance(stored, list) or not isinstance(state.get("modules", {}), Mapping):
            raise CheckpointMismatchError("the states of schedulers or modules are not a list")
        if given is not None and len(given) != len(stored):
            raise ValueError(
                f"the checkpoint holds {len(stored)} schedulers, but {len(given)} were given: pass "
                "to load() what was passed to save()"
            )
        for number, (scheduler, said) in enumerate(zip(given or (), stored, strict=False)):
            check_state(said, scheduler, f"schedulers.{number}")
        if self._scaler is not None and state.get("scaler") is None:
            raise ValueError("the checkpoint holds no scaler: save(..., scaler=scaler) stores it")
        if self._scaler is not None and state["scaler"]:
            check_state(state["scaler"], self._scaler, "scaler")
            if "scale" in state["scaler"]:
                check_finite(state["scaler"]["scale"], "scaler.scale")

    # -- the optimizer ----------------------------------------------------------------------------

    def _check_groups(
        self, opt: ZeroOptimizer, matching: Matching, groups: list[State], *, strict: bool
    ) -> None:
        check_groups(groups)
        if len(groups) != len(opt.groups):
            raise ValueError(
                f"the checkpoint has {len(groups)} parameter groups, this optimizer "
                f"{len(opt.groups)}: make it with the same groups"
            )
        for number, (stored, members) in enumerate(zip(groups, opt.groups, strict=True)):
            names = {self._held.names[p] for p in members}
            differing = sorted(names ^ {matching.name_here(n) for n in stored["params"]})
            if differing and strict:
                raise ValueError(
                    f"parameter group {number} has other members in the checkpoint than here; "
                    f"{differing[0]!r} is in one of them only"
                )

    def _plan_state(self, opt: ZeroOptimizer, plan: LoadPlan, stored: session.Stored) -> None:
        """The inner optimizer's state and options."""
        loaded = LoadedState(opt, stored.state["groups"])
        state: dict[torch.Tensor, State] = {}
        for piece in self._held.pieces:
            found = plan.matching.states(piece.name)
            values = plan.matching.by_name(stored.manifest.values, piece.name)
            if piece.param is None or not (found or values):
                continue
            owner = self._held.params[piece.name]
            decoded = loaded.decode(values, piece.param, piece.name)
            loaded.check({**found, **decoded}, owner, piece.name, piece.param.dtype)
            new = {key: self._state(loaded, plan, piece, key) for key in found}
            new.update(loaded.fitted(decoded, owner, piece.param.dtype))
            state[piece.param] = new
        frozen = self._frozen(loaded, plan, stored.manifest.values)
        loaded.settle(state)
        self._loaded = loaded
        plan.then(lambda: loaded.put_state(state, frozen))

    def _state(
        self, loaded: LoadedState, plan: LoadPlan, piece: HeldPiece, key: str
    ) -> torch.Tensor:
        """What is going to be a piece's state: memory that was read to, where that is possible."""
        assert piece.param is not None
        info = plan.matching.states(piece.name)[key]
        span = state_span(info, piece.name, piece.shape, piece.span)
        shape = tuple(piece.param.shape) if info.shape == piece.shape else info.shape
        dtype = arrays.dtype_of(info.dtype)
        same = plan.matching.updated_dtype(piece.name) == arrays.dtype_name(piece.param)
        if not same and key != "step" and dtype.is_floating_point:
            dtype = piece.param.dtype  # the optimizer updates another dtype now than it did then
        dtype = loaded.dtype(self._held.params[piece.name], piece.param.dtype, key, dtype)
        present = loaded.opt.inner.state.get(piece.param, {}).get(key)
        fits = (
            isinstance(present, torch.Tensor)
            and (tuple(present.shape), present.dtype) == (shape, dtype)
        )
        in_file = fits and self._offload is not None and self._offload.holds(present)
        name = arrays.dtype_name(dtype)
        if piece.param.device.type == "cpu" and not in_file:
            memory: torch.Tensor = plan.fetch([(info, 1.0)], span, name)
            return memory.view(shape)
        if not fits:
            present = torch.empty(shape, dtype=dtype, device=piece.param.device)
        assert isinstance(present, torch.Tensor)
        plan.fill(Slot(piece.name, shape, span, name, _copy_to(present)), [(info, 1.0)])
        return present

    def _frozen(
        self, loaded: LoadedState, plan: LoadPlan, stored: Mapping[str, Mapping[str, Any]]
    ) -> dict[torch.nn.Parameter, State]:
        """The state of parameters of the optimizer that are not sharded here: frozen ones."""
        sharded = {p for section in loaded.opt.sections for p in section.params}
        found: dict[torch.nn.Parameter, State] = {}
        for param in loaded.opt.all_params():
            name = self._held.names[param]
            states = plan.matching.states(name)
            values = plan.matching.by_name(stored, name)
            if param in sharded or not (states or values):
                continue
            decoded = loaded.decode(values, param, name)
            loaded.check({**states, **decoded}, param, name, param.dtype)
            new = {
                key: plan.fetch([(info, 1.0)], Span(0, info.numel), info.dtype).view(info.shape)
                for key, info in states.items()
            }
            found[param] = {**new, **loaded.fitted(decoded, param, param.dtype)}
        return found

    # -- taking effect ----------------------------------------------------------------------------

    def changes(self, stored: session.Stored) -> Iterator[session.Change]:
        if self._loaded is not None:
            yield self._loaded.options_change()
        extra = stored.state.get("modules", {})
        for path, module in self._held.modules_with_extra_state():
            if path in extra:
                yield extra_state_change(f"modules.{path}", module, extra[path])
        states = stored.state.get("schedulers", ())
        for number, (scheduler, state) in enumerate(
            zip(self._schedulers or (), states, strict=False)
        ):
            yield state_change(f"schedulers.{number}", scheduler, state)
        if self._scaler is not None and stored.state["scaler"]:
            yield state_change("scaler", self._scaler, stored.state["scaler"])

    def apply(self, plan: LoadPlan, stored: session.Stored) -> None:
        opt = self._held.opt
        with torch.no_grad():
            if opt is not None:
                opt.gradients.drop_all()  # they belong to the values that are replaced
            plan.apply()
            if opt is not None:
                opt.publish()
                opt.loaded()
            else:
                increment_version(list(self._held.params.values()))
            if self._resumption is not None:
                self._resumption.apply(plan)

    def prepare_generators(self, stored: Mapping[str, Any]) -> Callable[[], None]:
        acts = [generators.prepare(stored), generators.tried("torch", stored, _prepare_cpu)]
        if "cuda" in stored and torch.cuda.is_available():
            acts.append(generators.tried("cuda", stored, _prepare_cuda))

        def restore() -> None:
            for act in acts:
                act()

        return restore


def _prepare_cpu(stored: Any) -> Callable[[], None]:
    torch.Generator().set_state(stored)
    return lambda: torch.set_rng_state(stored)


def _prepare_cuda(stored: Any) -> Callable[[], None]:
    torch.Generator(device="cuda").set_state(stored)
    return lambda: torch.cuda.set_rng_state(stored)


def _copy_to(target: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Copies 1-D memory to a tensor of any strides and device."""

    def put(memory: torch.Tensor) -> None:
        target.detach().copy_(memory.view(target.shape))

    return put


def _whole_slot(name: str, tensor: torch.Tensor, *, per_rank: bool = False) -> Slot:
    span, dtype = Span(0, tensor.numel()), arrays.dtype_name(tensor)
    return Slot(name, tuple(tensor.shape), span, dtype, _copy_to(tensor), per_rank)
