"""A rank that answers nobody any more is found out by the one before it.

Who waits inside of a framework's kernels can raise nothing, and Horovod, which ends waits for ranks
that do not come, waits itself for one that is frozen or behind a cut link. So a thread of each rank
asks the next one whether it is there. A rank that does not answer for as long as the limit for all
waits ends the job: the one that asked says so, and leaves.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from zerohvd import ending, limits
from zerohvd.communication.collectives import Collectives
from zerohvd.peers.channel import (
    CONNECT_TIMEOUT,
    HERE,
    Address,
    PeerError,
    connect,
    service,
)

_INTERVAL = 15.0  # seconds between two questions, while they are answered
_TICK = 0.5  # and between two looks at the clock, while they are not

_watched: set[int] = set()


def watch_next(ranks: Collectives, hosts: Sequence[str]) -> None:
    """Watch the next rank until this process ends; all ranks call it, and each watches once."""
    own = None
    with contextlib.suppress(OSError, ImportError):  # the others must hear of it
        own = list(service(hosts).address)
    addresses = ranks.allgather_object(own, name="zero/agree/watch")
    if None in addresses:
        return
    # By process: a fork has the mark, but not the thread.
    if os.getpid() not in _watched:
        _watched.add(os.getpid())
        following = (ranks.rank + 1) % ranks.size
        neighbour = Neighbour(following, Address(*addresses[following]))
        threading.Thread(
            target=neighbour.watch, args=(ranks.rank,), name="zerohvd-watch", daemon=True
        ).start()


class Neighbour:
    """Another rank, as a thread of this one sees it."""

    def __init__(self, rank: int, address: Address, limit: float | None = None) -> None:
        self.rank, self._address = rank, address
        self._limit = limits.seconds() if limit is None else limit

    def watch(
        self, rank: int, leave: Callable[[str], None] = ending.leave, interval: float = _INTERVAL
    ) -> None:
        """Return when it has ended; `leave` when it has not answered `rank` for the limit."""
        # Firewalls may let nobody through: what has never been heard is not missed. And only the
        # address that has answered can say that the rank has ended: another one may refuse, or lead
        # nowhere, whatever the rank does.
        addresses = [self._address._replace(hosts=[host]) for host in self._address.hosts]
        for self._address in addresses:
            if self.answers():
                break
        else:
            return
        # Time in which this process itself was stopped is nobody's delay.
        longest = CONNECT_TIMEOUT * (len(self._address.hosts) + 1) + 2 * _TICK
        said: bool | None = True
        while said is not None:
            time.sleep(min(interval, self._limit / 5))
            missed, start = 0.0, time.monotonic()
            while (said := self.answers()) is False and missed <= self._limit:
                time.sleep(_TICK)
                missed += min(time.monotonic() - start, longest)
                start = time.monotonic()
            if said is False:
                leave(
                    f"rank {rank} has had no answer from rank {self.rank} for {missed:.0f} s: "
                    f"it is frozen, or its host cannot be reached ({limits.VARIABLE} is the limit)"
                )
                return

    def answers(self) -> bool | None:
        """Whether it is there; None: it has ended."""
        try:
            with connect(
                self._address, HERE, None, who=f"rank {self.rank}", limit=CONNECT_TIMEOUT
            ) as connection:
                return bool(connection.hear())
        except PeerError as error:
            refused = (ConnectionRefusedError, ConnectionResetError)
            return None if isinstance(error.__cause__, refused) else False
