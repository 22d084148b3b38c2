"""What is trained, as far as memory and traffic are concerned."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from zerohvd import numerics
from zerohvd.config import MIB
from zerohvd.layout import DTYPE_BYTES, Layout, ParamSpec, Piece, build_layout
from zerohvd.planning.timeline import Timeline

ROOT = 0
ROWS = -1  # a table that is sharded, and of which only rows are ever gathered


class Section(NamedTuple):
    """Parameters that share a layout."""

    layout: Layout
    params: tuple[int, ...]  # per parameter of the layout: its number in the workload
    units: tuple[int | None, ...]  # per bucket: its unit, ROOT or ROWS; None: always whole
    trained: bool = True


Sections = Callable[[int, int], Sequence[Section]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """What an optimizer holds of the parameters that it updates.

    Args:
        name: As the user knows it.
        per_element: Bytes of state per element, by the dtype that is updated.
        per_piece: Bytes per parameter, or part of one, that a rank updates: counters of steps.
        whole: Bytes of state per parameter (its number in the workload), where they do not follow
            from the number of elements: optimizers that need whole parameters.
        fixed: Bytes that every rank holds.
        temporary: Bytes per element of the largest piece, while it is updated.
    """

    name: str = "adam"
    per_element: Mapping[str, float]
    per_piece: int = 0
    whole: Mapping[int, int] | None = None
    fixed: int = 0
    temporary: float = 0.0

    def of_piece(self, param: int, piece: Piece, updated: str) -> float:
        """Bytes for what a rank owns of parameter `param`."""
        if self.whole is not None:
            return self.whole[param]
        return piece.param_span.length * self.per_element[updated] + self.per_piece


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and how an adapter lays it out.

    Args:
        name: In tables and sentences.
        framework: "torch" or "keras"; "" for numbers alone.
        sections: The layouts of a stage and a number of ranks, as the optimizer will make them.
        optimizer: What it holds.
        master_dtype: As configured; None: float32 for narrower floats.
        fixed: Bytes that every rank holds at every stage, such as statistics of batch norms.
        kernels: Bytes that the framework's kernels keep for themselves; part of the peak alone.
        wide_grads: Reduced gradients are kept in the dtype of the master.
        full_grads_below: Stages below this one hold the full gradients of a backward pass.
        keeps_grads: Gradients outlive the step, until they are cleared.
        in_flight: Buckets on their way at a time.
        copies_received: Of more than two ranks, a reducescatter receives a whole bucket before it
            is summed, and an allgather sends from a copy of the shard.
        fusion_bytes: What Horovod takes to put small tensors together.
        kept_units: How many of the last units stay gathered from the forward to the backward pass.
        units_known: Units come from a model; else what stage 3 gathers is not known.
        timeline: Activations, if a micro-step was measured.
        unmeasured: Why there is no timeline.
        notes: What else a reader should know.
    """

    name: str
    framework: str = ""
    sections: Sections
    optimizer: OptimizerCost
    master_dtype: str | None = None
    fixed: int = 0
    kernels: int = 0
    wide_grads: bool = False
    full_grads_below: int = 2
    keeps_grads: bool = True
    in_flight: int = 2
    copies_received: bool = False
    fusion_bytes: int = 0
    kept_units: int = 0
    units_known: bool = True
    timeline: Timeline | None = None
    unmeasured: str = ""
    notes: tuple[str, ...] = ()

    def updated(self, dtype: str) -> str:
        """The dtype that the optimizer updates parameters of `dtype` in."""
        return numerics.master_dtype(dtype, self.master_dtype)


def sections_of(
    specs: Sequence[ParamSpec],
    homes: Sequence[tuple[int | None, Sequence[int]]],
    lay_out: Callable[[Sequence[ParamSpec]], Layout],
    *,
    trained: bool = True,
) -> list[Section]:
    """A layout per home.

    Args:
        homes: A unit, None for parameters that are always whole, and the numbers of its parameters.
        lay_out: Of one home.
    """
    found = []
    for unit, numbers in homes:
        if numbers:
            layout = lay_out([specs[n] for n in numbers])
            units = (unit,) * len(layout.buckets)
            found.append(Section(layout, tuple(numbers), units, trained))
    return found


# -- numbers alone ---------------------------------------------------------------------------------

PRECISIONS: Mapping[str, tuple[str, str | None]] = {
    "fp32": ("float32", None),
    "mixed": ("float16", None),
    "bf16": ("bfloat16", "bfloat16"),
}
# Numbers of state per element; their bytes are those of the dtype that is updated.
STATES = {"adam": 2, "adamw": 2, "momentum": 1, "sgd": 0, "lion": 1, "adagrad": 1, "rmsprop": 1}

# Of the parameters that stand for a model of which only the size is known.
_LARGEST = 1 << 24
_NUMBERED = re.compile(r"(.*?(?:^|[./_]))(\d+)(?=[./_])")


def from_numbers(
    count: int,
    *,
    precision: str = "fp32",
    optimizer: str = "adam",
    layers: int | None = None,
    bucket_bytes: int = 8 * MIB,
) -> Workload:
    """A model of `count` parameters, counted as in the ZeRO paper.

    Args:
        precision: "fp32"; "mixed": 16-bit parameters and gradients, a float32 master and state;
            "bf16": everything in 16 bits.
        layers: How many equal units it has; None: what stage 3 gathers is not known.
    """
    if layers is not None and not 1 <= layers <= count:
        raise ValueError(f"layers must be between 1 and the {count} parameters, got {layers}")
    specs, units = _blocks(count, layers or 1)
    return from_specs(
        specs,
        units,
        name=f"{count:,} parameters",
        precision=precision,
        optimizer=optimizer,
        units_known=layers is not None,
        bucket_bytes=bucket_bytes,
    )


def from_specs(
    specs: Sequence[ParamSpec],
    units: Sequence[int],
    *,
    name: str,
    precision: str | None = None,
    optimizer: str = "adam",
    units_known: bool = True,
    bucket_bytes: int = 8 * MIB,
) -> Workload:
    """Parameters of which only names and shapes are known, counted as in the ZeRO paper.

    Args:
        units: Per parameter: its unit; 0 is the root.
        precision: As for `from_numbers`; None: as the dtypes are.
    """
    dtype, master = _precision(precision)
    if optimizer not in STATES:
        raise ValueError(
            f"without a model, the optimizer must be one of {', '.join(STATES)}, got {optimizer!r}"
        )
    if dtype is not None:
        specs = [dataclasses.replace(s, dtype=dtype) if "float" in s.dtype else s for s in specs]
    trained = [i for i, s in enumerate(specs) if "float" in s.dtype]
    by_unit = [
        (unit, [i for i in trained if units[i] == unit])
        for unit in sorted({units[i] for i in trained}, reverse=True)
    ]

    def sections(stage: int, size: int) -> list[Section]:
        ranks = 1 if stage == 0 else size
        # A single rank holds everything anyway.
        homes = by_unit if stage == 3 and size > 1 else [(None, trained)]
        return sections_of(
            specs, homes, lambda each: build_layout(each, ranks, bucket_bytes=bucket_bytes)
        )

    updated = {numerics.master_dtype(specs[i].dtype, master) for i in trained}
    return Workload(
        name=name,
        sections=sections,
        optimizer=OptimizerCost(
            name=optimizer, per_element={d: STATES[optimizer] * DTYPE_BYTES[d] for d in updated}
        ),
        master_dtype=master,
        fixed=sum(s.nbytes for s in specs if "float" not in s.dtype),
        kept_units=2 if units_known else 0,
        units_known=units_known,
        unmeasured="there is no model to run",
    )


def _precision(precision: str | None) -> tuple[str | None, str | None]:
    if precision is None:
        return None, None
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return PRECISIONS[precision]


def _blocks(count: int, layers: int) -> tuple[list[ParamSpec], list[int]]:
    """Parameters of equal units, and the unit of each."""
    specs: list[ParamSpec] = []
    units: list[int] = []
    for layer in range(layers):
        left = count * (layer + 1) // layers - count * layer // layers
        while left:
            length = min(left, _LARGEST)
            specs.append(ParamSpec(f"{len(specs)}", (length,)))
            units.append(layer + 1)
            left -= length
    return specs, units


def units_by_name(names: Sequence[str]) -> list[int]:
    """The unit of each parameter, guessed from names such as "encoder.layers.3.weight": what has
    the same path up to its first number. 0, the root, for all others."""
    paths = [_NUMBERED.match(name) for name in names]
    found = [path[0] if path else None for path in paths]
    families = Counter(path[1] for path in {p[0]: p for p in paths if p}.values())
    numbers: dict[str, int] = {}
    units = []
    for match, path in zip(paths, found, strict=True):
        if match is None or path is None or families[match[1]] < 2:
            units.append(ROOT)
        else:
            units.append(numbers.setdefault(path, len(numbers) + 1))
    return units


# -- a model that somebody asks about by name ------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the command line asks an adapter for."""

    optimizer: str = "adamw"
    precision: str | None = None
    batch: tuple[int, ...] | None = None
    """Shape of what the model is called with."""

    batch_dtype: str | None = None
    loss: Callable[[Any], Any] | None = None
    """Of the model's output."""
