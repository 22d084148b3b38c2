"""Reading and writing sharded parameters outside of the model's own passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from torch import nn

from zerohvd.communication.agreement import any_rank
from zerohvd.communication.rendezvous import Call
from zerohvd.errors import DisagreementError
from zerohvd.stage3.lifecycle import FAILED_ELSEWHERE
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives, join
from zerohvd.torch.params.owned import collectives_of, optimizer_of, units_of
from zerohvd.torch.stage3.units import ModuleUnit, Units

Ranks = TorchCollectives | LocalCollectives


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

    An error inside on one rank is raised there, and a DisagreementError on the others.
    """
    params = _parameters(what)
    _meet(params, writable, from_rank)
    held = _lend(params)
    whole = _unsharded(params, held) if writable else {}
    before = {param: param.data.clone() for members in whole.values() for param in members}
    try:
        try:
            with torch.no_grad() if writable else contextlib.nullcontext():
                yield
        except (HorovodInternalError, DisagreementError):
            raise  # as the other ranks do
        except Exception:
            _fail_together(held, whole, failed=True)
            raise
        _fail_together(held, whole, failed=False)
        if writable:
            _publish(held, whole, from_rank)
        else:
            for units, members in held:
                units.refuse_writes(members)
    except BaseException:
        for param, value in before.items():
            param.data.copy_(value)
        raise
    finally:
        for units, members in held:
            units.end_loan(members)


def _meet(params: Sequence[nn.Parameter], writable: bool, from_rank: int) -> None:
    """Return when all ranks have come to a block; raise on all of them if one does not."""
    owners = dict.fromkeys(optimizer_of(p) for p in params if writable or units_of(p) is not None)
    for owner in owners:
        if owner is not None:
            if writable and not 0 <= from_rank < owner.collectives.size:
                raise ValueError(
                    f"from_rank is {from_rank}, and the optimizer's ranks are 0 to "
                    f"{owner.collectives.size - 1}"
                )
            owner.meet(Call.GATHERED)


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


def _unsharded(
    params: Iterable[nn.Parameter], held: Iterable[tuple[Units, list[ModuleUnit]]]
) -> dict[Ranks, list[nn.Parameter]]:
    """The parameters that every rank holds whole, by the ranks that share them."""
    sharded = {p for _, members in held for unit in members for p in unit.params}
    everyone = join()
    found: dict[Ranks, list[nn.Parameter]] = {}
    for param in params:
        if param not in sharded and param.numel():
            found.setdefault(collectives_of(param) or everyone, []).append(param)
    return found


def _fail_together(
    held: Iterable[tuple[Units, list[ModuleUnit]]],
    whole: Iterable[Ranks],
    *,
    failed: bool,
) -> None:
    """Raise if the block has failed on another rank. Collective."""
    for units, _ in held:
        units.fail_together(failed)
    for ranks in whole:
        if any_rank(ranks, failed, name="zero/written/failed") and not failed:
            raise DisagreementError(FAILED_ELSEWHERE)


def _publish(
    held: Iterable[tuple[Units, list[ModuleUnit]]],
    whole: dict[Ranks, list[nn.Parameter]],
    root: int,
) -> None:
    for units, members in held:
        units.publish(members, root)
    for ranks, params in whole.items():
        if isinstance(ranks, TorchCollectives):
            for index, param in enumerate(params):
                value = param.data.contiguous()
                ranks.broadcast_in_place(value, root, name=f"zero/written/{index}")
                param.data.copy_(value)
