"""Collectives between one rank that asks and all others, over connections to it alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from zerohvd.communication.collectives import NumpyCollectives
from zerohvd.communication.log import CommLog
from zerohvd.errors import DisagreementError
from zerohvd.peers.channel import Connection


class StarCollectives(NumpyCollectives):
    """Numpy arrays by way of the rank that asks, which needs nothing of the others' main threads:
    a thread of each makes the same calls there.

    Attributes:
        root: The rank that asks.
    """

    def __init__(
        self, rank: int, size: int, root: int, connections: Mapping[int, Connection]
    ) -> None:
        """
        Args:
            connections: Of the root: to all other ranks; elsewhere to the root.
        """
        self.rank, self.size, self.root, self.log = rank, size, root, CommLog(size)
        self._connections = connections

    def _exchange(self, parts: list[bytes], call: str) -> list[bytes]:
        if self.rank != self.root:
            connection = self._connections[self.root]
            _send(connection, parts, call)
            return _receive(connection, call)
        sent = {rank: _receive(c, call) for rank, c in self._connections.items()}
        sent[self.rank] = parts
        for rank, connection in self._connections.items():
            _send(connection, [sent[r][rank] for r in range(self.size)], call)
        return [sent[r][self.rank] for r in range(self.size)]


def _send(connection: Connection, parts: list[bytes], call: str) -> None:
    connection.tell({"call": call, "lengths": [len(part) for part in parts]})
    connection.send(b"".join(parts))


def _receive(connection: Connection, call: str) -> list[bytes]:
    said = connection.hear()
    if said["call"] != call:
        raise DisagreementError(f"a rank was asked for {call}, and answered {said['call']}")
    data = memoryview(connection.receive())
    stops = list(itertools.accumulate(said["lengths"]))
    return [bytes(data[stop - n : stop]) for stop, n in zip(stops, said["lengths"], strict=True)]
