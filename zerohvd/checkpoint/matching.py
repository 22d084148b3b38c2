"""Which stored range goes where: names, kinds, dtypes and shapes of a checkpoint and of a model.

A tensor is stored as "<kind>/<name>". The model that loads may have more ranks, other shards, other
dtypes and other names than the one that was saved; everything that has to be decided about that is
decided here, by comparing a manifest with `Names` and `Slot`s. Nothing is read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from zerohvd.checkpoint.entries import Want
from zerohvd.checkpoint.errors import CheckpointMismatchError
from zerohvd.checkpoint.manifest import TensorInfo
from zerohvd.layout import Span

# Kinds of tensors. The state of an optimizer is "state.<key>". SHARED and OWN hold the arrays
# inside values that are no tensors: of all ranks, and of one. OWN also holds a rank's buffers
# where they differ from those of rank 0, as "<name>@<rank>".
PARAM, MASTER, BUFFER = "param", "master", "buffer"
STATE = "state."
SHARED, OWN = "shared", "own"
# Gradients that a rank has accumulated by itself, not reduced yet: "<name>@<rank>".
LOCAL_GRAD = "grad"

V = TypeVar("V")

# Stored tensors that are added up, each times a factor.
Parts = Sequence[tuple[TensorInfo, float]]


def own_name(name: str, rank: int) -> str:
    """The name under which a rank stores its own version of a tensor."""
    return f"{name}@{rank}"


def state_kind(key: Any) -> str:
    if not isinstance(key, str) or "/" in key:
        raise TypeError(f"the optimizer calls a state {key!r}; a name without slashes is needed")
    return f"{STATE}{key}"


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensors of the model that loads.

    Args:
        model: All parameters and buffers.
        aliases: Further name -> first name, of tied tensors.
        stored_as: Name in the model -> name in the checkpoint, where they are known to differ.
        optional: What a plain file of weights may lack.
    """

    model: Iterable[str]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stored_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Slot:
    """A range of a tensor of this rank that a load fills.

    Args:
        name: In the model.
        shape: Of the whole tensor.
        span: What is here, of the flattened tensor.
        dtype: To convert to.
        put: Takes the 1-D memory that `Staging` gave, filled; nothing is in use before.
        per_rank: The ranks may have stored different values.
        group: Slots of one group are applied together.
    """

    name: str
    shape: tuple[int, ...]
    span: Span
    dtype: str
    put: Callable[[Any], None]
    per_rank: bool = False
    group: int = 0


class Matching:
    """A checkpoint, or a plain file, as seen from the model that loads it.

    Args:
        tensors: What is stored.
        names: The model's.
        aliases: Further name -> first name, of tensors that were tied when they were saved.
        rank, size: Of this job.
        saved_size: Number of ranks that saved; 0: a plain file of weights.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        names: Names,
        *,
        aliases: Mapping[str, str],
        rank: int,
        size: int,
        saved_size: int,
    ) -> None:
        self.tensors = tensors
        self.rank, self.size, self.saved_size = rank, size, saved_size
        self._names, self._stored_aliases = names, aliases
        self._tied: dict[str, list[str]] = {}
        for alias, first in names.aliases.items():
            self._tied.setdefault(first, []).append(alias)

    # -- names ------------------------------------------------------------------------------------

    def candidates(self, name: str) -> Iterator[str]:
        """Names in the checkpoint for a name of the model, the likeliest first."""
        stored = self._names.stored_as.get(name, name)
        yield stored
        yield from self._tied.get(name, ())
        if stored in self._stored_aliases:
            yield self._stored_aliases[stored]

    def name_here(self, stored: str) -> str:
        """The model's first name for a name that was stored."""
        return self._names.aliases.get(stored, stored)

    def check_names(self) -> None:
        """Raise unless checkpoint and model have the same parameters and buffers."""
        stored = {t.name for t in self.tensors.values() if t.kind in (PARAM, BUFFER)}
        model = list(self._names.model)
        known = {self._names.stored_as.get(n, n) for n in model} | {*self._names.aliases}
        missing = [n for n in model if not any(c in stored for c in self.candidates(n))]
        if not self.saved_size:
            missing = [n for n in missing if n not in self._names.optional]
        unknown = {*stored, *self._stored_aliases} - known
        refuse_names(sorted(missing), sorted(unknown))

    def find(self, kind: str, name: str) -> TensorInfo | None:
        """The stored tensor of this kind for a name of the model."""
        for candidate in self.candidates(name):
            info = self.tensors.get(f"{kind}/{candidate}")
            if info is not None:
                return info
        return None

    # -- weights ----------------------------------------------------------------------------------

    def weight(self, slot: Slot) -> TensorInfo | None:
        """What to fill a slot of a parameter or buffer with; None: nothing was stored."""
        if slot.per_rank and self.size == self.saved_size:
            for candidate in self.candidates(slot.name):
                own = self.tensors.get(f"{OWN}/{own_name(candidate, self.rank)}")
                if own is not None:
                    check_shape(own, slot.name, slot.shape)
                    return own
        info = self.find(PARAM, slot.name) or self.find(BUFFER, slot.name)
        if info is None:
            return None
        master = self.tensors.get(f"{MASTER}/{info.name}")
        if master is not None and info.kind == PARAM and info.dtype != slot.dtype:
            info = master  # the finer of the two, where the stored parameter has another dtype
        check_shape(info, slot.name, slot.shape)
        return info

    # -- the optimizer ----------------------------------------------------------------------------

    def states(self, name: str) -> Mapping[str, TensorInfo]:
        """Key -> stored tensor, of the optimizer's state of a parameter."""
        return self.by_name(self._states_by_name, name)

    def any_state(self) -> bool:
        """Whether an optimizer's state was stored."""
        return bool(self._states_by_name)

    def by_name(self, stored: Mapping[str, Mapping[str, V]], name: str) -> Mapping[str, V]:
        """What was stored for a parameter, under whatever name; empty if nothing was."""
        found = (stored.get(candidate) for candidate in self.candidates(name))
        return next((f for f in found if f), {})

    @functools.cached_property
    def _states_by_name(self) -> dict[str, dict[str, TensorInfo]]:
        found: dict[str, dict[str, TensorInfo]] = {}
        for info in self.tensors.values():
            if info.kind.startswith(STATE):
                found.setdefault(info.name, {})[info.kind.removeprefix(STATE)] = info
        return found

    def updated_dtype(self, name: str) -> str | None:
        """The dtype that the optimizer updated: that of the master if there was one."""
        info = self.find(MASTER, name) or self.find(PARAM, name)
        return None if info is None else info.dtype

    # -- accumulated gradients --------------------------------------------------------------------

    def local_grads(self, name: str, *, average: bool = True) -> list[tuple[TensorInfo, float]]:
        """What this rank takes over of gradients that ranks had accumulated but not reduced.

        Its own, and those of ranks that are no more: rank r's go to rank r % size. The coming
        reduction divides by the number of ranks, which may be another one now.
        """
        mine = range(self.rank, self.saved_size, self.size)
        factor = self.size / self.saved_size if average and self.saved_size else 1.0
        return [(info, factor) for info in self._local(name, mine)]

    def reduced_local_grads(self, name: str) -> list[tuple[TensorInfo, float]]:
        """Their mean over all ranks: what a reduction would have made of them."""
        found = self._local(name, range(self.saved_size))
        return [(info, 1.0 / self.saved_size) for info in found]

    def any_local_grads(self, name: str) -> bool:
        return bool(self._local(name, range(self.saved_size)))

    def _local(self, name: str, ranks: Iterable[int]) -> list[TensorInfo]:
        keys = (
            [f"{LOCAL_GRAD}/{own_name(candidate, rank)}" for candidate in self.candidates(name)]
            for rank in ranks
        )
        found = (next((k for k in several if k in self.tensors), None) for several in keys)
        return [self.tensors[key] for key in found if key is not None]


def check_shape(info: TensorInfo, name: str, shape: tuple[int, ...]) -> None:
    """Raise unless a stored tensor has the shape of the model's."""
    if info.shape != shape:
        raise CheckpointMismatchError(
            f"{name!r} has shape {info.shape} in the checkpoint, but {shape} in the model "
            f"({info.key!r})"
        )


def _family(dtype: str) -> str:
    """Numbers of one family are converted into each other; others mean something else."""
    if dtype.startswith("complex"):
        return "complex numbers"
    return "floats" if "float" in dtype else "whole numbers"


def check_dtype(info: TensorInfo, dtype: str) -> None:
    """Raise unless a stored tensor can be converted."""
    if _family(info.dtype) != _family(dtype):
        raise CheckpointMismatchError(
            f"{info.key!r} holds {_family(info.dtype)} ({info.dtype}) in the checkpoint, but "
            f"{_family(dtype)} ({dtype}) are needed here"
        )


def state_span(info: TensorInfo, name: str, shape: tuple[int, ...], span: Span) -> Span:
    """Which elements of a stored state belong to the range `span` of a parameter.

    The same range where the state is elementwise; all of it where the parameter is whole.
    """
    if info.shape == shape:
        return span
    if span != (0, math.prod(shape)):
        raise ValueError(
            f"the state {info.kind.removeprefix(STATE)!r} of {name!r} has shape {info.shape} in "
            f"the checkpoint, the parameter {shape}: load it into an optimizer with "
            'partition="parameter"'
        )
    return Span(0, info.numel)


def refuse_names(missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Raise unless both are empty.

    Args:
        missing: What the model has and the checkpoint lacks.
        unknown: What the checkpoint has and the model lacks.
    """
    said = [
        f"the {what} {len(names)} tensors that the {other} lacks (the first: {names[0]!r})"
        for names, what, other in (
            (missing, "model has", "checkpoint"),
            (unknown, "checkpoint has", "model"),
        )
        if names
    ]
    if said:
        raise ValueError(
            f"{' and '.join(said)}. Load it into the model it was saved from, or pass strict=False "
            "to load what they have in common"
        )


class Staging(Protocol):
    """Memory of a framework that stored ranges are read to before they take effect."""

    def allocate(self, length: int, dtype: str, *, zeros: bool) -> Any:
        """1-D memory."""

    def destination(
        self, memory: Any, stored: str, factor: float | None
    ) -> memoryview | Callable[[int, memoryview], None]:
        """Where elements of dtype `stored` go so that they arrive in `memory`, as in `Want`.

        With a factor they are added, times this factor; without, they overwrite.
        """


class LoadPlan:
    """What to read, and what to do with it when all ranks have read theirs.

    Everything is read, and checked as it passes, into memory that nothing uses yet. So no byte is
    read twice and no load is half-done; it takes memory as large as this rank's shards meanwhile.
    """

    def __init__(self, matching: Matching, staging: Staging) -> None:
        self.matching = matching
        self.wants: list[Want] = []
        self._staging = staging
        self._after: dict[int, list[Callable[[], None]]] = {}

    def weights(self, slots: Iterable[Slot]) -> None:
        """Fill slots of parameters and buffers; what the checkpoint lacks stays as it is."""
        for slot in slots:
            info = self.matching.weight(slot)
            if info is not None:
                self.fill(slot, [(info, 1.0)])

    def fill(self, slot: Slot, parts: Parts) -> None:
        memory = self.fetch(parts, slot.span, slot.dtype)
        self.then(lambda: slot.put(memory), slot.group)

    def fetch(self, parts: Parts, span: Span, dtype: str) -> Any:
        """Memory that is going to hold the same range of each part, added up; without any, zeros.

        The caller may keep it: nobody else uses it.
        """
        adding = len(parts) != 1 or parts[0][1] != 1.0
        for info, _ in parts:
            check_dtype(info, dtype)
            if span.stop > info.numel:
                raise CheckpointMismatchError(
                    f"{info.key!r} has {info.numel} elements in the checkpoint, but {span.stop} "
                    "are needed"
                )
        memory = self._staging.allocate(span.length, dtype, zeros=adding)
        for info, factor in parts:
            into = self._staging.destination(memory, info.dtype, factor if adding else None)
            self.wants.append(Want(info.key, span, into))
        return memory

    def then(self, act: Callable[[], None], group: int = 0) -> None:
        """Call `act` once everything has been read on all ranks."""
        self._after.setdefault(group, []).append(act)

    def apply(self, group: int = 0) -> None:
        """Let a group take effect, and give back its memory piece by piece."""
        self.wants.clear()
        acts = self._after.pop(group, [])
        acts.reverse()
        while acts:
            acts.pop()()
