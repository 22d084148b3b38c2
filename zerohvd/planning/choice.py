"""One stage for all ranks, from each rank's plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from zerohvd.errors import DisagreementError
from zerohvd.planning.plan import NothingFitsError, Plan


class Talks(Protocol):
    """What is needed of collectives."""

    rank: int

    def allgather_object(self, value: Any, *, name: str) -> list[Any]: ...


def choose_together(ranks: Talks, make: Callable[[], Plan]) -> int:
    """The stage that fits on every rank: the highest of those that ranks would choose. Collective.

    The first rank says in one line what was chosen, and why.

    Raises:
        NothingFitsError: On all ranks, if nothing fits on one of them.
    """
    error: Exception | None = None
    stage, why, failed = -1, "", True
    try:
        plan = make()
        row = plan.chosen()
        stage, why, failed = -1 if row is None else row.stage, plan.recommendation, False
    except Exception as raised:  # the other ranks wait: they must hear of it before it is raised
        error = raised
    everyone = ranks.allgather_object([stage, why, failed], name="zero/plan")
    if error is not None:
        raise error
    broken = [r for r, (_, _, was) in enumerate(everyone) if was]
    if broken:
        raise DisagreementError(f"rank {broken[0]} could not plan for stage='auto': see its error")
    nothing = [reason for chosen, reason, _ in everyone if chosen < 0]
    if nothing:
        raise NothingFitsError(f"stage='auto': {nothing[0]}")
    chosen, reason, _ = max(everyone, key=lambda said: said[0])
    if ranks.rank == 0:
        print(f"zerohvd: stage='auto' takes {reason}", flush=True)
    return int(chosen)


def check_auto(stage: Any, memory: Any, **others: Any) -> bool:
    """Whether `stage` is "auto"; raises if what belongs to that is missing, or there without it."""
    if stage == "auto":
        if memory is None:
            raise ValueError("stage='auto' needs the memory of a rank, such as memory='16GiB'")
        return True
    if isinstance(stage, str):
        raise ValueError(f"stage must be 0, 1, 2, 3 or 'auto', got {stage!r}")
    given = [name for name, value in {"memory": memory, **others}.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} can be given with stage='auto' only, not {stage!r}")
    return False
