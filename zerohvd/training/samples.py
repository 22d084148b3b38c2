"""Shares of samples: every sample once, and no rank left waiting for another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class SampleShare:
    """Every `ranks`-th sample, from number `rank` on: shares differ by one at most."""

    samples: int
    ranks: int
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank must be in [0, num_replicas={self.ranks}), got {self.rank}")

    def __len__(self) -> int:
        return len(range(self.rank, self.samples, self.ranks))

    @property
    def largest(self) -> int:
        """Samples of the rank that has most."""
        return -(-self.samples // self.ranks)

    def most_steps(self, batch: int, *, drop_last: bool) -> int:
        """Steps of the rank that has most samples, in batches of `batch`."""
        return self.largest // batch if drop_last else -(-self.largest // batch)


def padded(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """The batches, then None until there have been `steps`."""
    done = 0
    for batch in batches:
        yield batch
        done += 1
    for _ in range(done, steps):
        yield None
