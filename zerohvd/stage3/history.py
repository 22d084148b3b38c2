"""Which recorded operations led to the content of some memory: for building a model without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Generic, TypeVar

Call = TypeVar("Call")


@dataclasses.dataclass(frozen=True, eq=False)
class Operation(Generic[Call]):
    """One operation that has been recorded.

    Args:
        call: How to do it.
        reads: Memories whose content it needs.
        writes: Memories that it changes.
        replaces: Those of `writes` whose content before does not matter.
    """

    call: Call
    reads: frozenset[Hashable]
    writes: frozenset[Hashable]
    replaces: frozenset[Hashable]


class History(Generic[Call]):
    """Operations in the order in which they were recorded."""

    def __init__(self) -> None:
        self._operations: list[Operation[Call]] = []
        self._writers: dict[Hashable, list[int]] = {}

    def add(self, operation: Operation[Call]) -> None:
        for memory in operation.writes:
            self._writers.setdefault(memory, []).append(len(self._operations))
        self._operations.append(operation)

    def behind(self, memory: Hashable) -> list[Call]:
        """The calls that lead to the last content of a memory, in order, and no others."""
        needed: set[int] = set()
        open_ = [(memory, len(self._operations))]
        while open_:
            wanted, before = open_.pop()
            for number in reversed(self._writers.get(wanted, [])):
                if number >= before:
                    continue
                operation = self._operations[number]
                if number not in needed:
                    needed.add(number)
                    open_.extend((m, number) for m in operation.reads if m != wanted)
                if wanted in operation.replaces:
                    break
        return [self._operations[number].call for number in sorted(needed)]
