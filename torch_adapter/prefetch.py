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
        place = len(self._now)
        if place and self._now[-1] is unit:
            place -= 1  # needed again at once: nothing new
        else:
            if place >= LONGEST:
                self.restart()
                place = 0
            self._now.append(unit)
        if place + 1 < len(self._last) and self._last[place] is unit:
            return self._last[place + 1]
        return None
