"""A torch model and its optimizer as the core plans them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zerohvd.config import MIB, ZeroConfig
from zerohvd.launchers import FUSION_BYTES
from zerohvd.layout import build_layout
from zerohvd.numerics import master_dtype
from zerohvd.planning.timeline import Timeline
from zerohvd.planning.workload import Section, Workload, sections_of
from zerohvd.stage3.planning import ModelPlan, UnitOptions
from zerohvd.torch.gradients.reducer import IN_FLIGHT
from zerohvd.torch.gradients.section import lay_out
from zerohvd.torch.params.owned import NamedParam
from zerohvd.torch.planning.micro_step import Loss, measure
from zerohvd.torch.planning.optimizer_state import optimizer_cost
from zerohvd.torch.stage3.planning import plan_model
from zerohvd.training.naming import name_params

# What is left of a step on a CPU beside its tensors: packed matrices, threads. 8 to 10 MiB were
# measured for models of all kinds; without it, plans of small models are too low.
_KERNELS = 8 * MIB


def describe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: ZeroConfig,
    units: UnitOptions,
    *,
    batch: Any = None,
    loss: Loss | None = None,
    device: str | torch.device | None = None,
) -> Workload:
    """What a model and its optimizer will need. Nothing is allocated, nothing is changed.

    Args:
        config: Its stage does not count; its partition is "flat" or "parameter".
        units: As for stage 3.
        batch: What the model is called with, of one micro-step on one rank; None: activations
            are not measured.
        loss: Of the model's output; None: its `loss`, or the sum of its first tensor.
        device: Whose kernels the micro-step is measured with; None: that of the parameters, or
            the CPU for those on the meta device.
    """
    groups = [list(g["params"]) for g in optimizer.param_groups]
    names = name_params(groups, model.named_parameters())
    trained = [NamedParam(n, p) for p, n in names.items() if p.requires_grad]
    taken = {n.param for n in trained}
    frozen = [NamedParam(n, p) for n, p in model.named_parameters() if p not in taken]
    updated = [master_dtype(n.spec.dtype, config.master_dtype) for n in trained]
    whole = config.partition == "parameter"
    timeline, unmeasured = None, "no batch was given"
    if batch is not None:
        timeline, unmeasured = _measured(model, [n.param for n in trained], batch, loss, device)
    return Workload(
        name=f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters",
        framework="torch",
        sections=_Sections(trained, frozen, plan_model(model, units), config),
        optimizer=optimizer_cost(optimizer, [n.param for n in trained], updated, whole=whole),
        master_dtype=config.master_dtype,
        fixed=sum(b.untyped_storage().nbytes() for b in model.buffers()),
        kernels=_KERNELS if device_of(model, device).type == "cpu" else 0,
        wide_grads=True,
        in_flight=IN_FLIGHT,
        copies_received=True,
        fusion_bytes=FUSION_BYTES,
        kept_units=2,
        timeline=timeline,
        unmeasured=unmeasured,
    )


class _Sections:
    """The sections of a stage, as ZeroOptimizer makes them."""

    def __init__(
        self,
        trained: Sequence[NamedParam],
        frozen: Sequence[NamedParam],
        plan: ModelPlan,
        config: ZeroConfig,
    ) -> None:
        self._trained, self._frozen, self._plan, self._config = trained, frozen, plan, config

    def __call__(self, stage: int, size: int) -> list[Section]:
        config = dataclasses.replace(self._config, stage=stage)
        named = [*self._trained, *self._frozen]
        specs = [n.spec for n in named]
        number = {n.param: i for i, n in enumerate(named)}
        trained = range(len(self._trained))
        frozen = range(len(self._trained), len(named))
        if stage < 3 or size == 1:  # a rank on its own holds everything anyway
            parts: list[tuple[int | None, Sequence[int]]] = [(None, trained)]
            rest: list[tuple[int | None, Sequence[int]]] = [(None, frozen)]
        else:
            parts = self._divide(self._trained, number)
            rest = self._divide(self._frozen, number)
        return [
            *sections_of(specs, parts, lambda each: lay_out(each, config, size)),
            # Frozen parameters below stage 3 stay as they are, without padding.
            *sections_of(
                specs,
                rest,
                lambda each: build_layout(each, size if stage == 3 else 1),
                trained=False,
            ),
        ]

    def _divide(
        self, named: Sequence[NamedParam], number: dict[nn.Parameter, int]
    ) -> list[tuple[int | None, Sequence[int]]]:
        parts = self._plan.divide([n.param for n in named])
        return [(unit, [number[p] for p in params]) for unit, params in parts]


def device_of(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Whose kernels are meant: the given device, that of the parameters, or the CPU."""
    if device is not None:
        return torch.device(device)
    found = [p.device for p in model.parameters() if not p.is_meta]
    return found[0] if found else torch.device("cpu")


def _measured(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    batch: Any,
    loss: Loss | None,
    device: str | torch.device | None,
) -> tuple[Timeline | None, str]:
    try:
        return measure(model, params, batch, loss, device_of(model, device)), ""
    except Exception as error:  # whatever the user's model raises
        reason = str(error).strip().splitlines() or [""]
        return None, f"the model did not run without memory ({type(error).__name__}: {reason[0]})"
