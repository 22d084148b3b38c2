"""What one step moves, when the step may be a graph that Python does not see running.

A collective is recorded when it is called or traced. Collectives in a branch are recorded with a
mark, an integer variable of the framework, to which the branch writes at run time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from zerohvd.communication.log import CommLog


class StepTraffic:
    """The record of one step.

    Args:
        size: How many ranks there are.
        step: The number of the current step, an integer variable.
        marks: Name -> variable. They outlive this object: a graph that was traced for an earlier
            record writes to the same variables.
        new_mark: Makes a variable of value -1.
    """

    def __init__(
        self, size: int, step: Any, marks: dict[str, Any], new_mark: Callable[[], Any]
    ) -> None:
        self._size, self._step, self._marks, self._new_mark = size, step, marks, new_mark
        # What every step moves (""), and each branch; a branch's mark is the last step it ran in.
        self._moved: dict[str, list[Callable[[CommLog], None]]] = {"": []}
        self._branch = ""

    @contextlib.contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """Record the collectives of a branch; to be entered inside the branch."""
        self._mark(name).assign(self._step)
        self._moved[name] = []
        before, self._branch = self._branch, name
        try:
            yield
        finally:
            self._branch = before

    def add(
        self,
        name: str,
        op: str,
        dtype: str,
        elements: int,
        nbytes: int,
        moved: int | None = None,
    ) -> None:
        """As `CommLog.add`."""
        self._note(name, lambda log: log.add(name, op, dtype, elements, nbytes, moved))

    def _note(self, name: str, add: Callable[[CommLog], None]) -> None:
        self._moved[self._branch].append(add)

    def add_gathered_rows(
        self, name: str, rows: Any, dtype: str, width: int, itemsize: int
    ) -> None:
        """Record an allgather whose number of rows, of `width` elements, only the step knows."""
        count = self._mark(f"{name}/rows")
        count.assign(rows)

        def add(log: CommLog) -> None:
            own = int(count) * width
            nbytes = own * itemsize
            log.add(name, "allgather", dtype, own, nbytes, nbytes * (self._size - 1))

        self._note(name, add)

    def add_sent_rows(self, name: str, rows: Any, dtype: str, width: int, itemsize: int) -> None:
        """Record an alltoall whose number of rows, of `width` elements, only the step knows."""
        count = self._mark(f"{name}/rows")
        count.assign(rows)

        def add(log: CommLog) -> None:
            sent = int(count) * width
            log.add(name, "alltoall", dtype, sent, sent * itemsize, sent * itemsize)

        self._note(name, add)

    def log(self) -> CommLog:
        """What the most recent step moved."""
        log = CommLog(self._size)
        for branch, moved in self._moved.items():
            if not branch or int(self._marks[branch]) == int(self._step):
                for add in moved:
                    add(log)
        return log

    def _mark(self, name: str) -> Any:
        if name not in self._marks:
            self._marks[name] = self._new_mark()
        return self._marks[name]


class PassTraffic(StepTraffic):
    """The record of collectives that layers call: each name counts once, the last one of it."""

    def __init__(
        self, size: int, step: Any, marks: dict[str, Any], new_mark: Callable[[], Any]
    ) -> None:
        super().__init__(size, step, marks, new_mark)
        self._named: dict[str, Callable[[CommLog], None]] = {}

    def _note(self, name: str, add: Callable[[CommLog], None]) -> None:
        self._named[name] = add

    def add_to(self, log: CommLog) -> None:
        """Add what one pass moves."""
        for add in self._named.values():
            add(log)
