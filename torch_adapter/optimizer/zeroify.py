"""Model and optimizer in one call."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, cast

import torch

from zerohvd.planning.choice import check_auto, choose_together
from zerohvd.stage3.planning import PERSIST_BELOW, UnitOptions
from zerohvd.torch.communication.collectives import TorchCollectives, join
from zerohvd.torch.optimizer.distributed import DistributedOptimizer, told_to_others
from zerohvd.torch.optimizer.plan import plan
from zerohvd.torch.optimizer.zero_optimizer import ZeroOptimizer
from zerohvd.torch.params.owned import NamedParam, check_free, set_collectives, units_of
from zerohvd.torch.planning.micro_step import Loss
from zerohvd.torch.stage3 import placeholder
from zerohvd.torch.stage3.deferred import fill_deferred, materialise
from zerohvd.torch.stage3.hooks import UnitHooks
from zerohvd.torch.stage3.module_state import ModuleState
from zerohvd.torch.stage3.planning import plan_model
from zerohvd.torch.stage3.units import Units


def zeroify(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    stage: int | str = 2,
    memory: str | float | None = None,
    batch: Any = None,
    loss: Loss | None = None,
    units: Any = None,
    persist_below: int | None = None,
    reshard_after_forward: bool | None = None,
    **options: Any,
) -> tuple[torch.nn.Module, ZeroOptimizer]:
    """Give all ranks the weights of the first one, and shard the optimizer.

    Args:
        model: The model; it stays the same object.
        optimizer: The plain torch optimizer of its parameters.
        stage: As for `DistributedOptimizer`; 3: parameters are sharded too; "auto": the lowest that
            fits into `memory`, of which the first rank tells.
        memory: For "auto": what a rank may hold, such as "16GiB".
        batch, loss: For "auto", as for `plan`: without a batch, activations are not counted.
        units: Stage 3: the modules whose parameters are gathered together. A class, a tuple of
            classes, a predicate of a module, or a list of modules. None: repeated blocks, which are
            items of a ModuleList or Sequential that share their class. What is in no unit is the
            root, which is gathered during the whole of the forward and backward pass. Copy what you
            want to keep of a parameter beyond the pass (`.clone()`): the memory of a view is freed.
        persist_below: Stage 3: parameters with fewer elements than this stay gathered.
        reshard_after_forward: Stage 3: False keeps units gathered between their forward and
            backward pass: less traffic, more memory.
        options: Any keyword of `DistributedOptimizer` but `named_parameters`.
    """
    with told_to_others(options.get("process_set")):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if "named_parameters" in options:
            raise TypeError("zeroify() takes the names from the model: drop named_parameters")
        said = {
            "units": units,
            "persist_below": persist_below,
            "reshard_after_forward": reshard_after_forward,
        }
        given = {key: value for key, value in said.items() if value is not None}
        automatic = check_auto(stage, memory, batch=batch, loss=loss)
        if given and stage != 3 and not automatic:
            what = ", ".join(given)
            raise ValueError(f"{what} can be given with stage=3 only, and stage is {stage}")
        for name, param in model.named_parameters():
            check_free(NamedParam(name, param))
    _let_go(model)
    if automatic:
        how = {"memory": memory, "batch": batch, "loss": loss, **given, **options}
        stage = _choose(model, optimizer, how)
        given = given if stage == 3 else {}
    with told_to_others(options.get("process_set")):
        if stage == 3:
            options["_units"] = _plan(model, options.get("process_set"), given)
        else:
            materialise(model, list(model.parameters()))
    sharded = DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), stage=cast(int, stage), **options
    )
    for param in model.parameters():
        set_collectives(param, sharded.collectives)
    _broadcast(model, sharded)
    if sharded.units is not None:
        sharded.units.reshard_idle()
        sharded.units.hooks = [UnitHooks(sharded.units), ModuleState(model, sharded.units)]
    return model, sharded


def _choose(model: torch.nn.Module, optimizer: torch.optim.Optimizer, how: dict[str, Any]) -> int:
    """The stage that all ranks take."""
    ranks = join(how.get("process_set"))
    known = {k: v for k, v in how.items() if k in inspect.signature(plan).parameters}
    return choose_together(ranks, lambda: plan(model, optimizer, ranks=ranks.size, **known))


def _let_go(model: torch.nn.Module) -> None:
    """Make a model whole that an optimizer which is gone has left sharded."""
    for param in model.parameters():
        units = units_of(param)
        if units is not None:
            units.dissolve()


def _plan(model: torch.nn.Module, process_set: Any, given: dict[str, Any]) -> Any:
    if isinstance(given.get("units"), torch.nn.ModuleList):
        given = {**given, "units": list(given["units"])}
    options = UnitOptions(**{"persist_below": PERSIST_BELOW, **given})
    if not isinstance(join(process_set), TorchCollectives):
        # A rank on its own holds everything anyway.
        options = UnitOptions(units=options.units, persist_below=sys.maxsize)
    plan = plan_model(model, options)
    materialise(model, [p.param for p in plan.persistent])
    return functools.partial(Units, plan, options, fill_deferred)


def _broadcast(model: torch.nn.Module, opt: ZeroOptimizer) -> None:
    """After the layouts have been compared: ranks with other models get an error, not a hang."""
    collectives = opt.collectives
    if not isinstance(collectives, TorchCollectives):
        return
    whole = [s.flat for s in opt.sections if s.flat.replicated]
    for index, flat in enumerate(flat for memory in whole for flat in memory.flats):
        collectives.broadcast_in_place(flat, name=f"zero/init/bucket{index}")
    sharded = opt.sharded_params()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor in sharded or placeholder.is_placeholder(tensor):
            continue
        if tensor.numel():
            contiguous = tensor.detach().contiguous()
            collectives.broadcast_in_place(contiguous, name=f"zero/init/{name}")
            tensor.detach().copy_(contiguous)
