"""Which variables get gradients, where a step is a graph and must know it when it is traced.

Ranks may have gradients of different variables. The first step compares them, to report what no
rank uses; every step adds up how many ranks have a gradient of each variable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from zerohvd.communication.collectives import Collectives
from zerohvd.errors import DisagreementError


class Present(NamedTuple):
    """The gradients of a step, on all ranks together."""

    params: frozenset[int]  # the variables that have a gradient on any rank
    rows: dict[int, str]  # those whose gradient came as rows of a table: the dtype of the indices

    def expects_rows(self, param: int, is_table: bool) -> bool:
        """Whether other ranks may have rows where this rank has no gradient."""
        return param in self.rows or (is_table and param not in self.params)


def agree_on_present(
    ranks: Collectives, mine: Collection[int], rows: Mapping[int, str], *, weighted: bool
) -> Present:
    """Return what has a gradient on any rank; all ranks call it in the first step.

    Args:
        ranks: Joins the ranks.
        mine: The variables that have one on this rank.
        rows: Those whose gradient consists of rows, and the dtype of the rows' indices.
        weighted: Whether this rank has a weight. All ranks must have one, or none.
    """
    said = [weighted, list(mine), [list(item) for item in rows.items()]]
    found = ranks.allgather_object(said, name="zero/agree/present")
    if len({w for w, _, _ in found}) > 1:
        with_weight = [rank for rank, (w, _, _) in enumerate(found) if w]
        raise DisagreementError(
            f"only ranks {with_weight} say how much they count in the first step: either all "
            "ranks call zero.weight, or train on what zero.shard_dataset gave them, or none"
        )
    indices = frozenset(i for _, params, _ in found for i in params)
    return Present(indices, {i: dtype for _, _, r in found for i, dtype in r})
