"""Which variables get gradients, where a step is a graph and must know it when it is traced."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zerohvd.communication.collectives import Collectives
from zerohvd.errors import DisagreementError


def agree_on_present(
    ranks: Collectives, mine: Collection[int], *, weighted: bool
) -> frozenset[int]:
    """Return the variables that have a gradient on any rank; all ranks call it in the first step.

    Args:
        ranks: Joins the ranks.
        mine: The variables that have one on this rank.
        weighted: Whether this rank has a weight. All ranks must have one, or none.
    """
    found = ranks.allgather_object([weighted, list(mine)], name="zero/agree/present")
    if len({w for w, _ in found}) > 1:
        with_weight = [rank for rank, (w, _) in enumerate(found) if w]
        raise DisagreementError(
            f"only ranks {with_weight} say how much they count in the first step: either all "
            "ranks call zero.weight, or train on what zero.shard_dataset gave them, or none"
        )
    return frozenset(i for _, indices in found for i in indices)


def check_present(mine: Collection[int], present: Collection[int], names: Sequence[str]) -> None:
    """Raise if a variable has a gradient now and had none on any rank in the first step."""
    late = [names[i] for i in mine if i not in present]
    if late:
        raise ValueError(
            f"gradients for {late} came after a first step without them on any rank; give the "
            "optimizer all variables that it will ever update in the first step, or use one "
            "optimizer per group of variables"
        )
