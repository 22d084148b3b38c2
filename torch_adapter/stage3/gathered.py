"""Reading and writing sharded parameters outside of the model's own passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zerohvd.torch.communication.collectives import TorchCollectives, join
from zerohvd.torch.params.owned import units_of
from zerohvd.torch.stage3.units import ModuleUnit, Units


@contextlib.contextmanager
def gathered(
    what: nn.Module | nn.Parameter | Iterable[nn.Parameter],
    writable: bool = False,
    *,
    from_rank: int = 0,
) -> Iterator[None]:
    """Hold parameters gathered inside the block, on every rank. All ranks must enter it.

        with zero.gathered(model.embed):
            print(model.embed.weight.norm())
        with zero.gathered(model.embed, writable=True):
            model.embed.weight.zero_()

    Parameters that are not sharded may be among them. The units they belong to are gathered whole,
    so take one after the other of a model that does not fit. A view that is kept after the block
    shows the values of the block and keeps that copy alive; what is written into it is lost.

    Args:
        what: A module, a parameter, or several parameters.
        writable: Keep what has been written when the block ends. All ranks get the values of rank
            `from_rank`, whatever the others have written.
        from_rank: The rank, inside the optimizer's process set, whose values are kept.
    """
    params = _parameters(what)
    held = _lend(params)
    try:
        with torch.no_grad() if writable else contextlib.nullcontext():
            yield
        if writable:
            _publish(params, held, from_rank)
        else:
            for units, members in held:
                units.refuse_writes(members)
    finally:
        for units, members in held:
            units.end_loan(members)


def _parameters(what: Any) -> list[nn.Parameter]:
    if isinstance(what, nn.Module):
        return list(what.parameters())
    if isinstance(what, torch.Tensor):
        what = [what]
    found = list(what.values() if isinstance(what, dict) else what)
    for item in found:
        if not isinstance(item, torch.Tensor):
            raise TypeError(
                f"gathered() takes a module, a parameter or several parameters, got {item!r}"
            )
    return found


def _lend(params: Iterable[nn.Parameter]) -> list[tuple[Units, list[ModuleUnit]]]:
    wanted: dict[Units, list[nn.Parameter]] = {}
    for param in params:
        units = units_of(param)
        if units is not None:
            wanted.setdefault(units, []).append(param)
    held: list[tuple[Units, list[ModuleUnit]]] = []
    for units, members in wanted.items():
        found = units.of(members)
        units.lend(found)
        held.append((units, found))
    return held


def _publish(
    params: Iterable[nn.Parameter], held: Iterable[tuple[Units, list[ModuleUnit]]], root: int
) -> None:
    for units, members in held:
        units.publish(members, root)
    sharded = {p for _, members in held for unit in members for p in unit.params}
    for index, param in enumerate(p for p in params if p not in sharded):
        ranks = join()
        if isinstance(ranks, TorchCollectives) and param.numel():
            value = param.data.contiguous()
            ranks.broadcast_in_place(value, root, name=f"zero/written/{index}")
            param.data.copy_(value)
