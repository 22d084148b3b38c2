"""Which rank has not come to a step, where a framework waits inside of its own kernels.

There nobody in Python sees a wait go on. So a rank notes when a step begins and ends, and a thread
of it looks now and then: when a step has taken long, it asks the others whether they have begun it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from zerohvd import limits
from zerohvd.communication.collectives import Collectives
from zerohvd.communication.log import CommLog, Wait
from zerohvd.peers.channel import CONNECT_TIMEOUT, Address, Connection, connect, service
from zerohvd.peers.stalls import Answer, Inquiry, Whereabouts

_LOOK = 1.0  # seconds between two looks


class StepWatch:
    """Warns of ranks that are missing in a step of this one.

    Args:
        call: The user's, in which the steps are.
    """

    def __init__(self, collectives: Collectives, hosts: Sequence[str], call: str) -> None:
        """All ranks must call it."""
        self._rank, self._members, self._hosts = collectives.rank, collectives.members, hosts
        self._call = call
        self._log = CommLog(collectives.size)
        self._here = Whereabouts(self._log)
        self._inquiry = Inquiry(collectives.size)
        self._steps = 0
        self._over = threading.Event()
        self._addresses = self._meet(collectives)
        if self._addresses:
            self._here.ask = self._ask_all
            threading.Thread(target=self._look, name="zerohvd-steps", daemon=True).start()

    def _meet(self, collectives: Collectives) -> list[Address]:
        """The addresses of all ranks; nothing where one of them cannot listen."""
        own = None
        with contextlib.suppress(OSError, ImportError):
            self._service = service(self._hosts)
            own = list(self._service.address)
            self._service.offer(self._topic(self._rank, "here"), self._on_here)
            self._service.offer(self._topic(self._rank, "all"), self._on_all)
        heard = collectives.allgather_object(own, name="zero/fit/addresses")
        return [] if None in heard else [Address(*address) for address in heard]

    def _topic(self, rank: int, what: str) -> str:
        return f"steps/{self._call}/r{rank}/{what}"

    # -- what this rank does -----------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins, and the one before has ended."""
        self.pause()
        self._steps += 1
        self._log.waits = Wait(f"step {self._steps} of {self._call}", time.perf_counter())
        self._here.started(self._name(), lambda: False)

    def pause(self) -> None:
        """The latest step has ended."""
        self._log.waits = None
        self._here.ended(self._name())

    def close(self) -> None:
        """Look and answer no more."""
        self._over.set()
        self._here.ask = None
        if self._addresses:
            for what in ("here", "all"):
                self._service.withdraw(self._topic(self._rank, what))

    def _name(self) -> str:
        return f"step {self._steps}"

    # -- the thread that looks ---------------------------------------------------------------------

    def _look(self) -> None:
        warned = 0
        while not self._over.wait(_LOOK):
            waits, step = self._log.waits, self._steps
            if waits is None or warned == step:
                continue
            waited = time.perf_counter() - waits.start
            if waited >= limits.warning_seconds():
                warned = step
                self._warn(waits.what, waited)

    def _warn(self, what: str, waited: float) -> None:
        missing = self._here.who_is_missing(self._name(), self._members, self._hosts)
        # If all are in the step it is only slow, or is being traced; and ranks that wait in
        # different collectives of it are named by Horovod.
        if missing.startswith("Missing:"):
            missing += f" {limits.NAMED}, with the parameters."
            limits.say_stalled(self._members[self._rank], self._members, what, waited, missing)

    # -- asking and answering ----------------------------------------------------------------------

    def _on_here(self, connection: Connection, name: Any) -> None:
        connection.tell(self._here.answer(name, self._steps))

    def _on_all(self, connection: Connection, name: Any) -> None:
        connection.tell(self._inquiry.about(name, self._ask_one))

    def _ask_all(self, name: str) -> list[Answer | None]:
        if self._rank == 0:
            return self._inquiry.about(name, self._ask_one)
        return [None if a is None else Answer(*a) for a in self._ask(0, "all", name)]

    def _ask_one(self, rank: int, name: str) -> Any:
        return self._ask(rank, "here", name)

    def _ask(self, rank: int, what: str, name: str) -> Any:
        limit = CONNECT_TIMEOUT * (1 if what == "here" else 4)
        topic, who = self._topic(rank, what), f"rank {self._members[rank]}"
        with connect(self._addresses[rank], topic, name, who=who, limit=limit) as connection:
            return connection.hear()
