"""The sharded optimizer, at all stages."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from zerohvd.config import ZeroConfig
from zerohvd.errors import NonFiniteError, ShardedStateError
from zerohvd.numerics import check_norm_type, clip_factor, divide_factors
from zerohvd.torch import compat
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.communication.entry import GROUP, STATE, STEP, Entry
from zerohvd.torch.gradients import weighting
from zerohvd.torch.gradients.hooks import GradHooks
from zerohvd.torch.gradients.reduced import ReducedGrads
from zerohvd.torch.gradients.rounds import Rounds, check_passes
from zerohvd.torch.optimizer import state, update
from zerohvd.torch.optimizer.offload import Offload
from zerohvd.torch.params.naming import name_parameters
from zerohvd.torch.params.section import Memory, NamedParam, ShardedParams
from zerohvd.torch.stage3.units import Units
from zerohvd.torch.tied import TiedGradients

MakeUnits = Callable[[TorchCollectives | LocalCollectives, str], Units]

# Several optimizers in one script need names of their own for their collectives. Those of one
# process set are made in the same order by all its members, as all ranks run the same script.
_instances: dict[int, Iterator[int]] = {}


def _instance_name(collectives: TorchCollectives | LocalCollectives) -> str:
    if isinstance(collectives, LocalCollectives):
        return "zero"
    members = collectives.process_set_id
    return f"zero{members}.{next(_instances.setdefault(members, itertools.count()))}"


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose state, and from stage 2 on gradients, are sharded over the ranks.

    Made by `DistributedOptimizer`. `param_groups` and `state` are those of the inner optimizer,
    which updates only this rank's pieces of the parameters; learning rates and other options may
    be changed there as usual. The model keeps its full parameters below stage 3.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named: Sequence[NamedParam],
        collectives: TorchCollectives | LocalCollectives,
        config: ZeroConfig,
        *,
        wire: torch.dtype | None,
        average: bool,
        predivide: float,
        passes: int,
        units: MakeUnits | None = None,
        offload: Offload | None = None,
    ) -> None:
        """
        Args:
            units: Makes the units of stage 3, for these collectives under this prefix.
            offload: Where the inner optimizer's tensors live; None: with the parameters.
        """
        self.offload = offload
        self.inner = inner
        self.config = config
        self.collectives = collectives
        self.prefix = _instance_name(collectives)
        self._wire = wire
        self._factors = divide_factors(average, collectives.size, predivide)
        self.average = average
        self.rounds = Rounds(
            collectives, stage=config.stage, passes=passes, prefix=self.prefix
        )
        self.units = None if units is None else units(collectives, self.prefix)
        wait = None if self.units is None else self.units.waiting.wait
        self.entry = Entry(collectives, f"{self.prefix}/agree", wait)
        self.sections: list[ShardedParams] = []
        self._reduced = ReducedGrads(
            self.sections, collectives, self.prefix, replicated=config.stage == 0
        )
        tied = TiedGradients([n.param for n in named])  # its hooks come before the others
        self._hooks: list[GradHooks | TiedGradients] = [tied]
        weakref.finalize(self, tied.remove)
        self.groups: list[list[torch.nn.Parameter]] = [
            list(g["params"]) for g in inner.param_groups
        ]
        self.named = {n.param: n for n in named}
        # State of parameters that are not sharded, because they have been frozen all along.
        self.unsharded: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self.loads = 0
        self._accumulate_only = False
        self._skip_synchronize = False
        super().__init__([{"params": []}], dict(inner.defaults))
        self._sentinel = torch.nn.Parameter(torch.zeros(1))
        self._shard_initially(named)
        self._begin_step()
        self._log_is_stale = False
        collectives.log.reset()
        if self.units is not None:
            self.units.on_gather = _unless_gone(self._renew_log)

    # -- being a torch optimizer -------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups: its options, and this rank's pieces as params."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if value:  # torch's own constructor assigns an empty list
            raise AttributeError("param_groups cannot be replaced; use add_param_group()")

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state of this rank's pieces."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        if value:
            raise AttributeError("state cannot be replaced; use load_state_dict()")

    def __repr__(self) -> str:
        c = self.config
        return (
            f"ZeroOptimizer(stage={c.stage}, size={self.collectives.size}, "
            f"partition={c.partition!r}, inner={self.inner!r})"
        )

    def __getstate__(self) -> Any:
        raise ShardedStateError(
            "a sharded optimizer cannot be pickled or copied: it holds only this rank's part of "
            "the state. Call opt.state_dict() on every rank, and save what it returns."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__getstate__()

    # -- building ----------------------------------------------------------------------------

    def _shard_initially(self, named: Sequence[NamedParam]) -> None:
        trainable = [n for n in named if n.param.requires_grad]
        full = state.detach_state(self.inner)
        for group in self.inner.param_groups:
            group["params"] = []
        self._add_sections(trainable)
        if self.units is not None:
            self.units.shard_rest({p for s in self.sections for p in s.params})
        self.loads = len(full)
        state.distribute(self, full)
        self.absorb()

    def settings(self) -> dict[str, Any]:
        return {
            **self.config.as_dict(),
            "optimizer": type(self.inner).__name__,
            "compression": str(self._wire),
            "average": self.average,
            "gradient_predivide_factor": self._factors.before,
            "backward_passes_per_step": self.rounds.passes,
        }

    def _add_sections(self, named: Sequence[NamedParam]) -> None:
        """Shard more parameters: together, or by units."""
        if self.units is None:
            parts: Iterable[tuple[Sequence[NamedParam], Memory | None]] = [(named, None)]
        else:
            self.units.take_out({n.param for n in named})
            parts = self.units.divide(named)
        for part, memory in parts:
            if part:
                self._add_section(part, memory)

    def _add_section(
        self, named: Sequence[NamedParam], memory: Memory | None = None
    ) -> ShardedParams:
        """Shard more parameters. They must already be in `_groups_of`."""
        section = ShardedParams(
            named,
            self.collectives,
            self.config,
            prefix=f"{self.prefix}/s{len(self.sections)}",
            wire=self._wire,
            factors=self._factors,
            settings=self.settings(),
            memory=memory,
            master=None if self.offload is None else self.offload.master,
        )
        number = self.rounds.add(section)
        self.sections.append(section)
        if self.units is not None:
            self.units.gradients.append(section.reducer.memory)
        group_of = {p: g for g, params in enumerate(self.groups) for p in params}
        for owned in section.owned:
            group = group_of[section.params[owned.piece.param]]
            self.inner.param_groups[group]["params"].append(owned.tensor)
        self._hooks.append(GradHooks(section.params, self, number))
        section.set_owner(self)
        self._ensure_a_piece()
        return section

    def _ensure_a_piece(self) -> None:
        """GradScaler refuses an optimizer without any gradient, which a rank that owns nothing
        would be; such a rank shows one element that never changes."""
        params = self.inner.param_groups[0]["params"]
        owns = any(s.owned for s in self.sections)
        if not owns and not params:
            params.append(self._sentinel)
        elif owns and any(p is self._sentinel for p in params):
            params[:] = [p for p in params if p is not self._sentinel]

    def all_params(self) -> Iterator[torch.nn.Parameter]:
        return itertools.chain.from_iterable(self.groups)

    # -- gradients on their way ----------------------------------------------------------------

    def _begin_step(self) -> None:
        self.entered = False  # the other ranks have been told that a step is under way
        self.synchronized = False
        self.weight: float | None = None
        self._overflow: bool | None = None  # agreed by all ranks; None: nobody has asked
        self._clipped = False

    def enter_step(self) -> None:
        if self.entered:
            return
        self.entered = True
        self._renew_log()
        self.weight = weighting.announced()
        if self.weight is not None:
            if not self.average:
                raise ValueError("a weight needs op=hvd.Average: a sum does not weigh ranks")
            self.rounds.weight = self.weight
        self.rounds.notice_frozen()
        self.entry.open(
            STEP,
            self.all_params(),
            weighted=self.weight is not None,
            passes=self.rounds.passes,
            options=self._options(),
        )

    def _renew_log(self) -> None:
        """Something is moved for the first time since the last step."""
        if self._log_is_stale:
            self.collectives.log.reset()
            self._log_is_stale = False

    def _options(self) -> str:
        """What would let the ranks drift apart if it differed."""
        rates = [g.get("lr") for g in self.inner.param_groups]
        loads = self.loads + (0 if self.units is None else self.units.loads)
        return repr([loads, [r for r in rates if isinstance(r, float)]])

    def arrived(self, section: int, index: int) -> None:
        """A gradient has been accumulated by a backward pass."""
        if self.units is not None:
            self.units.after_gradient(self.sections[section].params[index])
        if self.synchronized:
            self.rounds.refuse(section, index)
        if not self.entered:
            for each in self.sections:
                each.reducer.release()
        if self._accumulate_only:
            self.rounds.accumulated(section, index)
            return
        self.enter_step()
        self._check_weight()
        self.rounds.arrived(section, index)

    def _check_weight(self) -> None:
        """A weight that came too late, or changed, would be ignored silently."""
        announced = weighting.announced()
        if announced != self.weight:
            raise ValueError(
                f"zero.weight({announced:g}) came after gradients of this step had left with "
                f"{'no weight' if self.weight is None else f'weight {self.weight:g}'}. Give one "
                "weight per step, before its first backward pass"
            )

    # -- what a script calls -------------------------------------------------------------------

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait until this rank's pieces hold the reduced gradients; all ranks must come here.

        `step()` does it by itself. Call it to look at or change gradients before, which are the
        `.grad` of `opt.param_groups[i]["params"]`: this rank's share.
        """
        if self.synchronized:
            return
        self._send_rest()
        self._await_reduced()

    def _await_reduced(self) -> None:
        for section in self.sections:
            section.reducer.finish()
            section.reducer.drop_full()
        self.synchronized = True
        if self.weight is not None:
            self._reduced.divide_by_weights(self.weight)
        for section in self.sections:
            section.set_piece_grads(section.buckets)
        self._sentinel.grad = torch.zeros(1)

    def _send_rest(self) -> None:
        self._adopt_unfrozen()
        self.enter_step()
        self._check_weight()
        self.entry.check()  # before waiting for buckets that other ranks may never send
        if self.units is not None:
            self.units.settle()
        self.rounds.send_rest()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step()` inside does not synchronize: gradients are as `synchronize()` left them."""
        if self.config.stage > 0 and not self._clipped:
            warnings.warn(
                "after synchronize() the reduced gradients are those of opt.param_groups; the "
                "model's own are gone, so torch.nn.utils.clip_grad_norm_(model.parameters()) did "
                "nothing. Call opt.clip_grad_norm_() instead.",
                stacklevel=3,
            )
        self._skip_synchronize = True
        try:
            yield
        finally:
            self._skip_synchronize = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to the model's full gradients; nothing is moved."""
        before, self._accumulate_only = self._accumulate_only, True
        try:
            yield
        finally:
            self._accumulate_only = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect this many backward passes before each `step()`, from the next step on."""
        if self.entered and not self.synchronized:
            raise RuntimeError(
                "set_backward_passes_per_step() was called between backward() and step(); "
                "call it after step()"
            )
        self.rounds.passes = check_passes(passes)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, weight: float | None = None
    ) -> Any:
        """Reduce what is left to reduce, update this rank's shard, and share the new parameters.

        Args:
            closure: Computes the loss and its gradients; called once, before anything else.
            weight: How much this rank's gradients count. They must not have left yet: say
                `zero.weight(n)` before the backward pass, or run it under `no_sync()`.

        Returns:
            What `closure` returned.
        """
        loss = None
        if compat.take_scale(self):
            raise TypeError(
                "torch.amp.GradScaler looks at the gradients of one rank, so ranks would skip "
                "different steps: write scaler = zero.GradScaler(...) in its place, with the same "
                "arguments; a scaler class of your own derives from zero.GradScaler"
            )
        if weight is not None:
            self._announce(weight)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._skip_synchronize and not self.synchronized:
            raise RuntimeError(
                "step() was called under skip_synchronize() without synchronize() before it"
            )
        self._check_sections()
        if self.units is not None and self.synchronized:
            self.units.settle()  # the model may have run since; what it gathered is out of date
        if self.config.grad_clip is not None:
            self.clip_grad_norm_(self.config.grad_clip)
        self._update()
        self.end_step()
        weighting.clear()
        return loss

    # -- for zero.GradScaler -------------------------------------------------------------------

    @torch.no_grad()
    def agree_on_overflow(self) -> None:
        """Reduce the gradients, and let every rank see that one of them is not finite."""
        self.synchronize()
        if self._overflow is None:
            self._overflow = self._reduced.spread_overflow(self._sentinel)

    def scaled_by_caller(self) -> contextlib.AbstractContextManager[None]:
        """Inside, GradScaler unscales the gradients and decides whether to call `step()`."""
        return compat.unscaled_by_scaler(self)

    def end_skipped_step(self) -> None:
        """Drop the gradients of a step that the ranks have agreed not to take."""
        if self.synchronized and self._overflow:
            self.end_step()

    def _announce(self, weight: float) -> None:
        value = weighting.check_weight(weight)
        if self.entered and self.weight != value:
            raise ValueError(
                f"step(weight={weight!r}) came after gradients had left without it. Say "
                "zero.weight(n) before the backward pass, or run the backward pass under "
                "`with opt.no_sync():`"
            )
        weighting.weight(value)

    def _check_sections(self) -> None:
        for section in self.sections:
            section.check_in_place()

    def _update(self) -> None:
        if not self.synchronized:
            self._send_rest()
            if self.weight is not None:
                self._await_reduced()  # the sum of all weights is needed before any update
        self._sentinel.grad = None
        planned = update.plan_waves(self.sections, self.inner, self.offload)
        update.run(planned, self.inner, self.offload, synchronized=self.synchronized)
        for section in self.sections:
            section.reducer.drop_full()
        if self.units is not None:
            self.units.rest()
        self._note_written()

    def publish(self) -> None:
        """Publish shards that have been written from outside."""
        for section in self.sections:
            for handle in section.gather_start(section.buckets):
                handle.wait()
        self._note_written()

    def _note_written(self) -> None:
        # Written behind autograd's back: a graph that has saved the old values must not be used.
        compat.increment_version([p for s in self.sections for p in s.params])

    def end_step(self) -> None:
        self._reduced.clear()
        self.rounds.begin_step()
        self._begin_step()
        self._log_is_stale = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the model's gradients, and drop those that have been reduced but not applied."""
        if self.entered and not self.synchronized:
            raise RuntimeError(
                "zero_grad() was called between backward() and step() or synchronize(), while "
                "gradients were on their way. Call it before backward() or after step(). To drop "
                "the gradients of a step, call opt.synchronize() and then zero_grad(), on all "
                "ranks."
            )
        if self.synchronized:
            self.end_step()
        if set_to_none:
            for section in self.sections:
                section.reducer.release()
        for param in self.all_params():
            if param.grad is None:
                continue
            if set_to_none:
                param.grad = None
            else:
                param.grad.zero_()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the reduced gradients so that their global norm is at most `max_norm`.

        Use it in place of `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`, which would
        see only local gradients, or none. All ranks must call it.

        Returns:
            The norm of all gradients together, before clipping; the same on every rank.
        """
        p = check_norm_type(norm_type)
        self.synchronize()
        self._clipped = True
        norm = self._reduced.global_norm(p)
        if error_if_nonfinite and not math.isfinite(norm):
            raise NonFiniteError(
                f"the {p:g}-norm of the gradients is {norm}, so they cannot be clipped"
            )
        factor = clip_factor(norm, float(max_norm))
        if factor < 1.0:
            for grad in self._reduced.grads():
                grad.mul_(factor)
        return torch.tensor(norm)

    # -- more parameters -------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on all ranks; `param_group` as for any torch optimizer.

        Their names are those of `param_names` in the group if given.
        """
        if not self.__dict__.get("sections") and "_log_is_stale" not in self.__dict__:
            return  # torch's own constructor
        if self.entered:
            raise RuntimeError("add_param_group() was called between backward() and step()")
        group = dict(param_group)
        entries = group.pop("params")
        entries = [entries] if isinstance(entries, torch.Tensor) else list(entries)
        names = group.pop("param_names", None)
        if names is not None:
            entries = list(zip(names, entries, strict=True))
        named = name_parameters([entries], None, first_group=len(self.groups))
        known = set(self.all_params())
        for n in named:
            if n.param in known:
                raise ValueError(f"parameter {n.name!r} is in a parameter group already")
        self.entry.open(GROUP, self.all_params())
        self.entry.check()
        options = {**self.inner.defaults, **group, "params": []}
        if "param_names" in self.inner.param_groups[0]:
            options["param_names"] = [n.name for n in named]
        self.inner.param_groups.append(options)
        self.groups.append([n.param for n in named])
        self.named.update((n.param, n) for n in named)
        self._add_sections([n for n in named if n.param.requires_grad])

    def _adopt_unfrozen(self) -> None:
        """Shard parameters that were frozen when the optimizer was made and no longer are."""
        sharded = {p for section in self.sections for p in section.params}
        new = [p for p in self.all_params() if p.requires_grad and p not in sharded]
        if not new:
            return
        # All ranks have to come here: compare before the collectives of the new layout.
        self.enter_step()
        self.entry.check()
        self.entered = False
        self._add_sections([self.named[p] for p in new])
        kept = {p: self.unsharded.pop(p) for p in new if p in self.unsharded}
        state.distribute(self, kept)
        self.enter_step()

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self, *, to: int | None = None) -> dict[str, Any]:  # type: ignore[override]
        """The state of the plain optimizer, whole, on the CPU; all ranks must call it.

        Args:
            to: Collect it on this rank only; the others get empty states. None: on every rank.
        """
        if self.entered and self.rounds.passes == 1:
            raise RuntimeError(
                "state_dict() was called between backward() and step(), while gradients were on "
                "their way. Call it after step()."
            )
        self.entry.check()  # of a step under way
        self.entry.open(STATE, self.all_params(), options=self._options())
        self.entry.check()
        return compat.with_state_dict_hooks(self, lambda: state.consolidate(self, to))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of the plain optimizer, or of a sharded one of any size.

        Every rank passes the whole state and keeps its own part; nothing is communicated.
        """
        state.load(self, state_dict)
        self.absorb()
        self.loads += 1

    def absorb(self) -> None:
        """State that has been loaded goes where it belongs."""
        for section in self.sections if self.offload is not None else ():
            self.offload.absorb(self.inner, section)

    def close(self) -> None:
        """Let go of the model's parameters: another optimizer may take them over then.

        Deleting the last reference to the optimizer does the same.
        """
        for hooks in self._hooks:
            hooks.remove()
        for section in self.sections:
            section.set_owner(None)
            section.reducer.release()


def _unless_gone(method: Callable[[], None]) -> Callable[[], None]:
    """The same call, without keeping its object alive."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        living = held()
        if living is not None:
            living()

    return call


compat.unscales_itself(ZeroOptimizer)
