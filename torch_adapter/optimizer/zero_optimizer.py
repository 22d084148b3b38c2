"""The sharded optimizer, at all stages."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from zerohvd.communication.agreement import loaded_by_first_alone
from zerohvd.communication.instances import agree_on_instance
from zerohvd.communication.rendezvous import Call, Rendezvous
from zerohvd.communication.rounds import check_passes
from zerohvd.compression.codecs import codec_of
from zerohvd.compression.policies import DROPPED, keeps_errors
from zerohvd.config import ZeroConfig
from zerohvd.devices import check_devices
from zerohvd.errors import NonFiniteError, ShardedStateError
from zerohvd.monitoring.trace import wanted_trace
from zerohvd.numerics import check_norm_type, divide_factors
from zerohvd.torch import compat
from zerohvd.torch.communication import joining
from zerohvd.torch.communication.arrays import OWN_DEVICE, device_id
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.communication.packed.compression import Wires
from zerohvd.torch.gradients.owner import Gradients
from zerohvd.torch.gradients.section import Section
from zerohvd.torch.gradients.stand_in import WRONG_SCALER
from zerohvd.torch.optimizer import update
from zerohvd.torch.optimizer.offload import Offload
from zerohvd.torch.optimizer.resemblance import Resembling
from zerohvd.torch.optimizer.state import whole as state
from zerohvd.torch.optimizer.state.sharing import Holdings, Sharing
from zerohvd.torch.params.naming import name_parameters
from zerohvd.torch.params.owned import MakeMemory, NamedParam, set_collectives
from zerohvd.torch.stage3.deferred import is_deferred
from zerohvd.torch.stage3.units import Units
from zerohvd.training.ownership import unless_gone
from zerohvd.training.step import MustAgree

_log = logging.getLogger("zerohvd")

MakeUnits = Callable[[TorchCollectives | LocalCollectives, str], Units]


class Watcher(Protocol):
    """A Monitor, as far as an optimizer and its scaler know it."""

    def closure_ended(self) -> None:
        """What `step()` was given to call has computed the loss and its gradients."""

    def scaled_by(self, scaler: Any) -> None:
        """The scaler is about to call `step()`, or not."""

    def skipped(self) -> None:
        """It has not: there was an overflow."""


class ZeroOptimizer(Resembling, torch.optim.Optimizer):
    """A torch optimizer whose state, and from stage 2 on gradients, are sharded over the ranks.

    Made by `DistributedOptimizer`. `param_groups` and `state` are those of the inner optimizer,
    which updates only this rank's pieces of the parameters; learning rates and other options may
    be changed there as usual. The model keeps its full parameters below stage 3.

    Between `backward()` and `step()` the `.grad` of the model's parameters stands for the reduced
    gradients: torch's clipping functions, norms and changes in place act on what will be applied.
    These calls wait for the reduction, as `synchronize()` does, so all ranks make them. Under
    `no_sync()` gradients are this rank's own. After `step()` they are gone, but for stage 0, which
    keeps the averages until `zero_grad()` as Horovod does; ask `grad_norm()` for their norm.

    Attributes:
        inner: The wrapped optimizer.
        config: The settings all ranks agree on.
        collectives: Join the ranks that share the state.
        groups: The model's parameters, per parameter group of the inner optimizer.
        named: The names of these parameters.
        unsharded: State of parameters that are not sharded: they have been frozen all along.
        gradients: Own the gradients from their arrival to this rank's shards.
        units: Of stage 3; None below it.
        offload: Where the inner optimizer's tensors live; None: with the parameters.
        rendezvous: Where ranks compare what they are about to do.
        prefix: Of the names of collectives.
        watcher: A Monitor; None: there is none.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named: Sequence[NamedParam],
        collectives: TorchCollectives | LocalCollectives,
        config: ZeroConfig,
        *,
        wires: Wires,
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
        self.inner, self.config, self.collectives = inner, config, collectives
        self.offload = offload
        self.groups = [list(g["params"]) for g in inner.param_groups]
        self.named = {n.param: n for n in named}
        for param in self.named:
            set_collectives(param, collectives)
        self.unsharded: dict[torch.nn.Parameter, dict[str, Any]] = {}
        self._wires, self._factors = wires, divide_factors(average, collectives.size, predivide)
        self.prefix = _prefix(collectives)
        _check_devices(collectives, named)
        self.units = None if units is None else units(collectives, self.prefix)
        if self.units is not None and collectives.size > 1:
            self.units.codec = codec_of(wires.params)
        waiting = None if self.units is None else self.units.waiting
        self.rendezvous = Rendezvous(collectives, f"{self.prefix}/agree", waiting)
        self._agreed = MustAgree(self.groups, inner, self.units)
        self.gradients = Gradients(
            collectives,
            self.rendezvous,
            self._agreed,
            stage=config.stage,
            passes=passes,
            prefix=self.prefix,
            average=average,
            before_rest=None if self.units is None else self.units.settle,
            synchronize=unless_gone(self.synchronize),
        )
        self._skip_synchronize = False
        self.watcher: Watcher | None = None
        self._is_made = False
        self._sharing = self._share()
        # On the first rank: the whole state that was loaded, until all ranks are known to have it.
        self._loaded: Mapping[str, Any] | None = None
        super().__init__([{"params": []}], dict(inner.defaults))
        self._is_made = True
        self._shard_initially(named)
        collectives.log.reset()
        if isinstance(collectives, TorchCollectives):
            joining.note(self.rendezvous, collectives)
        if self.units is not None:
            self.units.on_gather = unless_gone(self.gradients.renew_log)
        self._trace_if_wanted()

    def _trace_if_wanted(self) -> None:
        """Write a trace of scripts that have no Monitor: ZEROHVD_TRACE=FOLDER."""
        c = self.collectives
        host = c.hosts[c.rank] if isinstance(c, TorchCollectives) and c.hosts else ""
        trace = wanted_trace(os.environ, c.members[c.rank], host)
        if trace is not None:
            c.log.watchers.append(trace)
            self.register_step_post_hook(trace.step_ended)

    def _share(self) -> Sharing | None:
        """Let other ranks ask for this one's part of the state; None: there is nothing to ask."""
        if not isinstance(self.collectives, TorchCollectives):
            return None
        sharing = Sharing(
            Holdings(
                self.inner, self.groups, self.unsharded, self.gradients.sections, self.prefix
            ),
            self.collectives,
            self._agreed,
            self.gradients,
            self.units,
        )
        weakref.finalize(self, sharing.let_go).atexit = False
        return sharing

    # -- being a torch optimizer -------------------------------------------------------------

    @property
    def _resembles(self) -> bool:
        return bool(vars(self).get("_is_made"))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: its options, and this rank's pieces as params."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if value:  # torch's own constructor assigns an empty list
            raise AttributeError("param_groups cannot be replaced; use add_param_group()")

    @property
    def state(self) -> Any:
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

    # -- parameters ----------------------------------------------------------------------------

    @property
    def sections(self) -> Sequence[Section]:
        """The sharded parameters, those that share a layout together."""
        return self.gradients.sections

    def all_params(self) -> Iterator[torch.nn.Parameter]:
        """The model's parameters, in the order of the groups."""
        return itertools.chain.from_iterable(self.groups)

    def sharded_params(self) -> set[torch.nn.Parameter]:
        """Those of them that are in a section."""
        return {p for section in self.sections for p in section.params}

    def settings(self) -> dict[str, Any]:
        """What is compared between the ranks, and stored in checkpoints."""
        return {
            **self.config.as_dict(),
            "optimizer": type(self.inner).__name__,
            "average": self.gradients.average,
            "gradient_predivide_factor": self._factors.before,
            "backward_passes_per_step": self.gradients.rounds.passes,
        }

    def _shard_initially(self, named: Sequence[NamedParam]) -> None:
        full = state.detach_state(self.inner)
        for group in self.inner.param_groups:
            group["params"] = []
        self._add_sections([n for n in named if n.param.requires_grad])
        if self.units is not None:
            self.units.shard_rest(self.sharded_params())
        self._agreed.loads = len(full)
        if full:
            self._keep_for_others(state.as_loaded(self, full))
        state.distribute(self, full)
        self._absorb()

    def _add_sections(self, named: Sequence[NamedParam]) -> None:
        """Shard more parameters, which are in `groups` already: together, or by units."""
        if self.units is None:
            parts: Iterable[tuple[Sequence[NamedParam], MakeMemory | None]] = [(named, None)]
        else:
            self.units.take_out({n.param for n in named})
            parts = self.units.divide(named)
        for part, memory in parts:
            if part:
                self._add_section(part, memory)

    def _add_section(self, named: Sequence[NamedParam], memory: MakeMemory | None) -> None:
        section = Section(
            named,
            self.collectives,
            self.config,
            prefix=f"{self.prefix}/s{len(self.sections)}",
            wires=self._wires,
            factors=self._factors,
            settings=self.settings(),
            memory=memory,
            master=None if self.offload is None else self.offload.master,
        )
        self.gradients.add(section)
        group_of = {p: g for g, params in enumerate(self.groups) for p in params}
        for owned in section.owned:
            group = group_of[section.params[owned.piece.param]]
            self.inner.param_groups[group]["params"].append(owned.tensor)
        section.set_owner(self)

    def _show_sentinel(self, shown: bool) -> None:
        """Show GradScaler a gradient on a rank that has none: it refuses such an optimizer."""
        params, sentinel = self.inner.param_groups[0]["params"], self.gradients.sentinel
        params[:] = [p for p in params if p is not sentinel]
        if shown:
            params.append(sentinel)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on all ranks; `param_group` as for any torch optimizer.

        Their names are those of `param_names` in the group if given.
        """
        if not self._is_made:
            return  # torch's own constructor
        if self.gradients.begun:
            raise RuntimeError("add_param_group() was called between backward() and step()")
        group = dict(param_group)
        entries = group.pop("params")
        entries = [entries] if isinstance(entries, torch.Tensor) else list(entries)
        names = group.pop("param_names", None)
        if names is not None:
            entries = list(zip(names, entries, strict=True))
        named = name_parameters(
            [entries], None, first_group=len(self.groups), is_deferred=is_deferred
        )
        known = set(self.all_params())
        for n in named:
            if n.param in known:
                raise ValueError(f"parameter {n.name!r} is in a parameter group already")
        self.meet(Call.GROUP)
        options = {**self.inner.defaults, **group, "params": []}
        if "param_names" in self.inner.param_groups[0]:
            options["param_names"] = [n.name for n in named]
        self.inner.param_groups.append(options)
        self.groups.append([n.param for n in named])
        self.named.update((n.param, n) for n in named)
        for n in named:
            set_collectives(n.param, self.collectives)
        self._add_sections([n for n in named if n.param.requires_grad])

    def _adopt_unfrozen(self) -> None:
        """Shard parameters that were frozen when the optimizer was made and no longer are."""
        sharded = self.sharded_params()
        new = [p for p in self.all_params() if p.requires_grad and p not in sharded]
        if not new:
            return
        self.gradients.compare_and_restart()
        self._add_sections([self.named[p] for p in new])
        kept = {p: self.unsharded.pop(p) for p in new if p in self.unsharded}
        state.distribute(self, kept)
        self.gradients.begin()

    def meet(self, call: Call) -> None:
        """Return when all ranks have made the same call; raise on all of them otherwise."""
        self.gradients.meet(call)

    # -- a step --------------------------------------------------------------------------------

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait until this rank's pieces hold the reduced gradients; all ranks must come here.

        `step()` does it by itself. Call it to look at or change gradients before, which are the
        `.grad` of `opt.param_groups[i]["params"]`: this rank's share.
        """
        if not self.gradients.synchronized:
            self._adopt_unfrozen()
            self.gradients.send_rest()
            self.gradients.await_reduced()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step()` inside does not synchronize: gradients are as `synchronize()` left them."""
        self._skip_synchronize = True
        try:
            yield
        finally:
            self._skip_synchronize = False

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside only add to the model's full gradients; nothing is moved."""
        return self.gradients.no_sync()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Expect this many backward passes before each `step()`, from the next step on."""
        if self.gradients.begun and not self.gradients.synchronized:
            raise RuntimeError(
                "set_backward_passes_per_step() was called between backward() and step(); "
                "call it after step()"
            )
        self.gradients.rounds.passes = check_passes(passes)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: float | None = None,
        **options: Any,
    ) -> Any:
        """Reduce what is left to reduce, update this rank's shard, and share the new parameters.

        Args:
            closure: Computes the loss and its gradients; called once, before anything else.
            weight: How much this rank's gradients count. They must not have left yet: say
                `zero.weight(n)` before the backward pass, or run it under `no_sync()`.
            options: For the inner optimizer's own `step()`.

        Returns:
            What `closure` returned.
        """
        if compat.take_scale(self):
            raise TypeError(WRONG_SCALER)
        try:
            return self._step(closure, weight, options)
        except BaseException:
            self.gradients.use_up_weight()
            raise

    def _step(
        self, closure: Callable[[], Any] | None, weight: float | None, options: dict[str, Any]
    ) -> Any:
        if weight is not None:
            self.gradients.announce(weight)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if self.watcher is not None:
                self.watcher.closure_ended()
        if self._skip_synchronize and not self.gradients.synchronized:
            raise RuntimeError(
                "step() was called under skip_synchronize() without synchronize() before it"
            )
        for section in self.sections:
            section.check_in_place()
            section.check_gradients()
        if self.units is not None and self.gradients.synchronized:
            self.units.settle()  # the model may have run since; what it gathered is out of date
        if self.config.grad_clip is not None:
            self.clip_grad_norm_(self.config.grad_clip)
        self._update(options)
        self.gradients.end()
        self._loaded = None
        if self.units is not None:
            self.units.loaded = {}
        if self._sharing is not None:
            self._sharing.steps += 1
        return loss

    def _changing(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, values change: no other rank may read them."""
        if self._sharing is None:
            return contextlib.nullcontext()
        return self._sharing.guard.changing()

    def _update(self, options: dict[str, Any]) -> None:
        if not self.gradients.synchronized:
            self._adopt_unfrozen()
            self.gradients.send_rest()
            if self.gradients.weight is not None:
                self.gradients.await_reduced()  # the sum of all weights comes before any update
        if self.gradients.synchronized:
            for section in self.sections:
                section.drop_unwanted()
        self.gradients.sentinel.grad = None
        split = update.can_be_split(self.inner) and not options
        if not split:  # its step() or hooks may keep gradients
            for section in self.sections:
                section.reducer.show_to_user()
        waves = update.plan_waves(self.sections, self.offload, split=split)
        synchronized = self.gradients.synchronized
        with self._changing():  # all ranks have come to this step
            update.run(waves, self.inner, self.offload, options, synchronized=synchronized)
        for section in self.sections:
            section.reducer.drop_full()
        self._note_written()

    def _note_written(self) -> None:
        # Written behind autograd's back: a graph that has saved the old values must not be used.
        compat.increment_version([p for s in self.sections for p in s.params])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the model's gradients, and drop those that have been reduced but not applied."""
        if self.gradients.begun and not self.gradients.synchronized:
            raise RuntimeError(
                "zero_grad() was called between backward() and step() or synchronize(), while "
                "gradients were on their way. Call it before backward() or after step(). To drop "
                "the gradients of a step, call opt.synchronize() and then zero_grad(), on all "
                "ranks."
            )
        if self.gradients.synchronized:
            self.gradients.end()
        self.gradients.cleared()
        if set_to_none:
            self.gradients.release()
        for param in self.all_params():
            if param.grad is not None:
                if set_to_none:
                    param.grad = None
                else:
                    param.grad.zero_()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the reduced gradients so that their global norm is at most `max_norm`.

        `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` does the same, and takes a little
        longer. All ranks must call it.

        Returns:
            The norm of all gradients together, before clipping; the same on every rank.
        """
        p = check_norm_type(norm_type)
        self.synchronize()
        norm = self.gradients.norm(p)
        if error_if_nonfinite and not math.isfinite(norm):
            raise NonFiniteError(
                f"the {p:g}-norm of the gradients is {norm}, so they cannot be clipped"
            )
        self.gradients.clip(norm, float(max_norm))
        return torch.tensor(norm)

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> float:
        """The norm of the reduced gradients of all parameters together; all ranks must call it.

        Before `step()` it is that of the gradients which will be applied, and waits for their
        reduction; after `step()`, until `zero_grad()` or the next backward pass, of those which
        were applied, clipped if they were.
        """
        p = check_norm_type(norm_type)
        if self.gradients.begun or self.gradients.weight_waits:
            self.synchronize()
        self.gradients.meet(Call.NORM)
        return self.gradients.norm_of_shards(p)

    def watch(self, watcher: Watcher | None, every: int = 0) -> None:
        """Let a Monitor know of skipped steps, and let ranks compare whether each has one.

        Args:
            every: Steps per record.
        """
        self.watcher, self._agreed.monitored = watcher, every

    # -- for zero.GradScaler -------------------------------------------------------------------

    @torch.no_grad()
    def agree_on_overflow(self) -> None:
        """Reduce the gradients, and let every rank see that one of them is not finite."""
        self.synchronize()
        self.gradients.agree_on_overflow()
        # A rank may own no piece, or pieces of frozen parameters only. On its own it has them all.
        self._show_sentinel(self.collectives.size > 1 and not self.gradients.any_reduced())

    def scaled_by_caller(self) -> contextlib.AbstractContextManager[None]:
        """Inside, GradScaler unscales the gradients and decides whether to call `step()`."""
        return compat.unscaled_by_scaler(self)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self, *, to: int | None = None) -> dict[str, Any]:
        """The state of the plain optimizer, whole, on the CPU.

        All ranks call it together. One rank may also call it alone, as in `if hvd.rank() == 0:
        torch.save(opt.state_dict(), path)`: the others give their parts whatever they do meanwhile,
        over TCP and after a moment in which they might have come.

        Args:
            to: Collect it on this rank only; the others get empty states. None: on every rank.
        """
        if self.gradients.begun and self.gradients.rounds.passes == 1:
            raise RuntimeError(
                "state_dict() was called between backward() and step(), while gradients were on "
                "their way. Call it after step()."
            )
        return compat.with_state_dict_hooks(self, lambda: self._whole_state(to))

    def _whole_state(self, to: int | None) -> dict[str, Any]:
        if self._sharing is not None:
            if self._sharing.is_alone("opt.state_dict()"):
                return self._sharing.take()
            self._share_loaded()
        self.meet(Call.STATE)
        return state.consolidate(self, self.collectives, to)

    def _share_loaded(self) -> None:
        """Load on all ranks what the first one alone has loaded; all of them must call it.

        `hvd.broadcast_optimizer_state` begins with it, as with `state_dict()` on every rank. A
        `step()` without it raises.
        """
        assert isinstance(self.collectives, TorchCollectives)
        found = loaded_by_first_alone(
            self.collectives,
            self._agreed.loads,
            self._loaded is not None,
            name=f"{self.prefix}/loads",
        )
        if found is not None:
            state.share(self, self._loaded, self.collectives)
            if self.collectives.rank != 0:
                self._absorb()
            self._agreed.loads, _ = found
        self._loaded = None

    def _keep_for_others(self, loaded: Mapping[str, Any]) -> None:
        if self.collectives.rank == 0 and self.collectives.size > 1:
            self._loaded = loaded

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of the plain optimizer, or of a sharded one of any size.

        Every rank passes the whole state and keeps its own part; nothing is communicated. If only
        rank 0 does, `hvd.broadcast_optimizer_state(opt, root_rank=0)` must follow on all ranks.
        """

        def load(given: dict[str, Any]) -> None:
            with self._changing():
                state.load(self, given)
                self.loaded()
            self._keep_for_others(given)

        compat.with_load_state_dict_hooks(self, state_dict, load)

    def loaded(self) -> None:
        """State has been written from outside: move it where it lives, and let ranks compare how
        often that has happened."""
        self._absorb()
        self._agreed.loads += 1
        self.gradients.forget_errors()
        if self.collectives.rank == 0 and keeps_errors(self._wires.grads):
            _log.info(DROPPED.format(self._wires.grads))

    def _absorb(self) -> None:
        if self.offload is not None:
            for section in self.sections:
                self.offload.absorb(self.inner, section)

    def publish(self) -> None:
        """Give all ranks the parameters whose shards have been written from outside."""
        for section in self.sections:
            for handle in section.gather_start(section.buckets, exactly=True):
                handle.wait()
        self._note_written()

    def settle_rounding(self) -> None:
        """Give all ranks the exact parameters, where these travel packed; all ranks must call it.

        A checkpoint holds one value per parameter: training goes on from that one too.
        """
        for section in self.sections:
            if section.rounds:
                section.refresh_masters(section.buckets)
                for handle in section.gather_start(section.buckets, exactly=True):
                    handle.wait()

    def close(self) -> None:
        """Let go of the model's parameters: another optimizer may take them over then.

        Deleting the last reference to the optimizer does the same.
        """
        self.gradients.close()
        if self._sharing is not None:
            self._sharing.close()
        joining.forget(self.rendezvous)
        for section in self.sections:
            section.set_owner(None)


compat.unscales_itself(ZeroOptimizer)


def _check_devices(
    collectives: TorchCollectives | LocalCollectives, named: Sequence[NamedParam]
) -> None:
    """Find out where the ranks are, and that each has a device of its own."""
    hosts = collectives.find_hosts()
    if isinstance(collectives, TorchCollectives) and collectives.by_nccl:
        mine = device_id(named[0].param.device) if named else None
        devices = collectives.allgather_object(mine, name="zero/agree/devices")
        check_devices(hosts, devices, fix=OWN_DEVICE)


def _prefix(collectives: TorchCollectives | LocalCollectives) -> str:
    if isinstance(collectives, LocalCollectives):
        return "zero"
    members = collectives.process_set_id
    return f"zero{members}.{agree_on_instance(collectives, members)}"
