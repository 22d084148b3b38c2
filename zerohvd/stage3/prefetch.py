"""Prefetch order: which unit is needed next, learned from the pass before."""

from __future__ import annotations

from typing import Generic, TypeVar

Unit = TypeVar("Unit")

# Bounds the memory of a script that never restarts a pass.
LONGEST = 100_000


class Order(Generic[Unit]):
    """Predicts the next unit from the last pass. A wrong prediction costs time and nothing else."""

    def __init__(self) -> None:
        self._last: list[Unit] = []
        self._now: list[Unit] = []

    def restart(self) -> None:
        """Begin a pass; what was noted so far becomes the prediction."""
        if self._now:
            self._last, self._now = self._now, []

    def after(self, unit: Unit) -> Unit | None:
        """Note that `unit` is needed now; return the one predicted next, None if unknown."""
        place = self._place(unit)
        if place == len(self._now):
            if place >= LONGEST:
                self.restart()
            self._now.append(unit)
        return next(iter(self.expected(unit, 1)), None)

    def expected(self, unit: Unit, count: int) -> list[Unit]:
        """Up to `count` units predicted after `unit`, which is needed now."""
        place = self._place(unit)
        known = place < len(self._last) and self._last[place] is unit
        return self._last[place + 1 : place + 1 + count] if known else []

    def is_last(self, unit: Unit) -> bool:
        """Whether `unit`, which is needed now, was the last of the pass before."""
        place = self._place(unit)
        return place + 1 == len(self._last) and self._last[place] is unit

    def _place(self, unit: Unit) -> int:
        again = bool(self._now) and self._now[-1] is unit  # needed again at once: nothing new
        return len(self._now) - again
