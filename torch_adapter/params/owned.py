"""Parameters with their names, the pieces that a rank owns of them, and who they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from zerohvd.layout import Layout, ParamSpec, Piece
from zerohvd.torch.communication import arrays
from zerohvd.training.ownership import OwnerMark


@dataclasses.dataclass(frozen=True)
class NamedParam:
    """A parameter of the model, with the name the user knows it by."""

    name: str
    param: torch.nn.Parameter
    group: int | str = 0  # parameters of different groups never travel together

    @property
    def spec(self) -> ParamSpec:
        # The kind of device, not its number: each rank has another GPU.
        group = f"{self.group}/{self.param.device.type}"
        return ParamSpec(
            self.name, tuple(self.param.shape), arrays.dtype_name(self.param.dtype), group
        )


@dataclasses.dataclass(frozen=True)
class OwnedPiece:
    """What this rank owns of a parameter, as the inner optimizer sees it."""

    piece: Piece
    tensor: torch.nn.Parameter  # a view of the flat parameters, or of a master
    on_its_way: torch.Tensor  # its gradient, while that is being reduced; see stand_in.py


class ParamMemory(Protocol):
    """Where the parameters of one Layout live.

    Attributes:
        flats: Per bucket: 1-D, padded.
        replicated: Every rank holds all of the parameters; else it holds its shards, and the rest
            travels when it is needed.
    """

    flats: list[torch.Tensor]
    replicated: bool

    def shard(self, b: int, rank: int) -> torch.Tensor:
        """Return the part of bucket `b` that `rank` owns: 1-D."""

    def moved(self) -> int | None:
        """Return the index of the first parameter that was given other memory."""

    def held(self) -> Sequence[torch.Tensor]:
        """Return the tensors that hold parameters between two steps."""


MakeMemory = Callable[[Layout, Sequence[torch.nn.Parameter]], ParamMemory]


# -- belonging -------------------------------------------------------------------------------------

_optimizer, _units = OwnerMark("_zerohvd_owner"), OwnerMark("_zerohvd_units")
_collectives = OwnerMark("_zerohvd_collectives")

set_optimizer, optimizer_of = _optimizer.set, _optimizer.owner_of  # who takes its gradients
set_units, units_of = _units.set, _units.owner_of  # who gathers it; None: it is whole
set_collectives, collectives_of = _collectives.set, _collectives.owner_of  # who shares it; or None


def check_free(named: NamedParam) -> None:
    """Raise if the parameter belongs to another sharded optimizer: that one takes its gradient."""
    if optimizer_of(named.param) is not None:
        raise ValueError(
            f"parameter {named.name!r} belongs to another sharded optimizer. One parameter can "
            "be in one of them; call close() on the old one, or delete it, before making a new one"
        )
