"""The ranks that train together, and how a configuration names them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd

# Process sets that optimizers of this process were given.
_seen: weakref.WeakSet[Any] = weakref.WeakSet()


class Members:
    """A process set; or the ranks of one that is not known in this process.

    A configuration names ranks, as a ProcessSet belongs to one job.
    """

    def __init__(self, process_set: Any = None, ranks: Sequence[int] | None = None) -> None:
        self._process_set = process_set
        self.ranks = list(ranks) if ranks is not None else _ranks_of(process_set)
        if self.ranks is not None and process_set is not None:
            _seen.add(process_set)

    @classmethod
    def of(cls, ranks: Sequence[int] | None) -> Members:
        found = (p for p in _seen if ranks is not None and list(p.ranks or []) == list(ranks))
        return cls(next(found, None), ranks)

    @property
    def process_set(self) -> Any:
        """The process set, None: all ranks. Raises if it is not known."""
        if self.ranks is None or self._process_set is not None:
            return self._process_set
        if not hvd.is_initialized() or hvd.size() == 1:
            return None  # one process, perhaps to look at a model
        raise ValueError(
            f"the optimizer was saved with a process set of the ranks {self.ranks}, and nobody "
            "knows which set of this job that is. Say so before training, on its ranks: "
            "model.optimizer.process_set = the_set; or model.optimizer.process_set = None for all "
            "ranks"
        )


def _ranks_of(process_set: Any) -> list[int] | None:
    """None: all ranks."""
    if process_set is None or process_set is hvd.global_process_set:
        return None
    return None if process_set.ranks is None else list(process_set.ranks)
