"""The order in which units are needed, learned from the pass before."""

from __future__ import annotations

from typing import Any

# A script that never comes back to the beginning must not make the list grow for ever.
LONGEST = 100_000


class Order:
    """What came after what in the last pass. A guess: being wrong costs time and nothing else."""

    def __init__(self) -> None:
        self._last: list[Any] = []
        self._now: list[Any] = []

    def restart(self) -> None:
        """A pass begins."""
        if self._now:
            self._last, self._now = self._now, []

    def after(self, unit: Any) -> Any:
        """Note that `unit` is needed now; the one that will be needed next, None if unknown."""
        place = self._place(unit)
        if place == len(self._now):
            if place >= LONGEST:
                self.restart()
            self._now.append(unit)
        return next(iter(self.expected(unit, 1)), None)

    def expected(self, unit: Any, count: int) -> list[Any]:
        """What will be needed after `unit`, which is needed now: as much as is known."""
        place = self._place(unit)
        known = place < len(self._last) and self._last[place] is unit
        return self._last[place + 1 : place + 1 + count] if known else []

    def is_last(self, unit: Any) -> bool:
        """Whether nothing will be needed after `unit`, which is needed now; no if unknown."""
        place = self._place(unit)
        return place + 1 == len(self._last) and self._last[place] is unit

    def _place(self, unit: Any) -> int:
        again = bool(self._now) and self._now[-1] is unit  # needed again at once: nothing new
        return len(self._now) - again
