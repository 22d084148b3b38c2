"""What one rank alone may ask of the others: `if hvd.rank() == 0: torch.save(opt.state_dict())`.

The ranks that share something sharded offer it to each other by way of the channel. A rank that
wants the whole first finds out whether all of them make the same call: then they do it together,
as ever. If they do not come, their threads give their parts, whatever their main threads do.

What a rank offers stays until the first rank has let go of it too, or has ended: the others may
come to the end of the script, or of the function that the optimizer lived in, long before it saves.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from zerohvd import limits
from zerohvd.communication.collectives import Collectives
from zerohvd.errors import ZeroError
from zerohvd.peers.channel import (
    CONNECT_TIMEOUT,
    HERE,
    Address,
    Connection,
    Handler,
    PeerError,
    Service,
    connect,
    service,
)
from zerohvd.peers.stalls import Answer, Inquiry, Whereabouts
from zerohvd.peers.star import StarCollectives

# Seconds in which all ranks come to a call that they make together. A call of one rank alone takes
# this much longer; ranks that come later get what they ask for all the same.
PATIENCE = 2.0
_POLL = 0.25
_INQUIRY_LIMIT = 4 * CONNECT_TIMEOUT  # for the answers of all ranks, some of which have ended

Job = Callable[[StarCollectives, Any], None]


class Version(NamedTuple):
    """Which values something sharded has: every rank's must be of the same version."""

    steps: int
    loads: int


class Guard:
    """Many threads read, or one changes.

    Readers must not exclude each other: two ranks that ask at once read on all ranks, each on some
    of them first, and would wait for each other.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._readers)
            yield


class Versioned(Protocol):
    """Something sharded that changes step by step."""

    guard: Guard

    @property
    def version(self) -> Version:
        """Of the values, as they are while nobody holds the guard."""

    @property
    def is_changing(self) -> bool:
        """Whether a step of all ranks is under way, which will lead to the next version."""


class Peers:
    """The ranks that share something sharded, from the point of view of one of them."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[Address],
        service: Service,
        prefix: str,
        subject: Versioned,
    ) -> None:
        """
        Args:
            addresses: Of all ranks.
            prefix: Of the names of topics.
            subject: What is sharded.
        """
        self._rank, self._addresses, self._service = rank, addresses, service
        self._prefix, self._subject = prefix, subject
        self._gone = threading.Event()
        self._watch: threading.Thread | None = None
        self._stay: limits.Deadline | None = None  # since the main thread has ended
        self._meeting = _Meeting(len(addresses))
        self._topics: set[str] = set()
        self._inquiry = Inquiry(len(addresses))
        self._offer("come", self._on_come)
        self._offer("alive", self._on_alive, self._stays)

    def _topic(self, rank: int, what: str) -> str:
        return f"{self._prefix}/r{rank}/{what}"

    def _offer(
        self, what: str, handler: Handler, stay: Callable[[], bool] | None = None
    ) -> None:
        self._topics.add(self._topic(self._rank, what))
        self._service.offer(self._topic(self._rank, what), handler, stay)

    def _ask(
        self, rank: int, what: str, request: Any, limit: float | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        return connect(
            self._addresses[rank],
            self._topic(rank, what),
            request,
            who=f"rank {rank}",
            limit=limits.seconds() if limit is None else limit,
        )

    # -- together or alone -------------------------------------------------------------------------

    def all_come(self, call: str) -> bool:
        """Whether all ranks make this call now; the same answer for those who do."""
        if self._rank == 0:
            return self._meeting.arrive(call, 0)
        with self._ask(0, "come", {"call": call, "rank": self._rank}) as connection:
            return bool(connection.hear())

    def _on_come(self, connection: Connection, request: Any) -> None:
        connection.tell(self._meeting.arrive(request["call"], request["rank"]))

    # -- who is missing ----------------------------------------------------------------------------

    def tell_whereabouts(self, here: Whereabouts) -> None:
        """Let ranks that wait for long find out what each has started."""

        def answer(connection: Connection, name: Any) -> None:
            connection.tell(here.answer(name, self._subject.version.steps))

        def answer_for_all(connection: Connection, name: Any) -> None:
            connection.tell(self._inquiry.about(name, self._ask_whereabouts))

        self._offer("whereabouts", answer)
        self._offer("all", answer_for_all)
        here.ask = self._missing_from

    def _missing_from(self, name: str) -> list[Answer | None]:
        if self._rank == 0:
            return self._inquiry.about(name, self._ask_whereabouts)
        with self._ask(0, "all", name, _INQUIRY_LIMIT) as connection:
            return [None if a is None else Answer(*a) for a in connection.hear()]

    def _ask_whereabouts(self, rank: int, name: str) -> Any:
        with self._ask(rank, "whereabouts", name, CONNECT_TIMEOUT) as connection:
            return connection.hear()

    # -- giving and taking -------------------------------------------------------------------------

    def give(self, what: str, job: Job) -> None:
        """Offer other ranks this one's part in a job; see `find_peers`."""

        def serve(connection: Connection, request: Any) -> None:
            with self._at(Version(*request["version"])):
                job(self._star(request["rank"], {request["rank"]: connection}), request["request"])

        self._offer(what, serve)

    @contextlib.contextmanager
    def take(self, what: str, call: str, request: Any = None) -> Iterator[StarCollectives]:
        """Collectives in which the other ranks' threads do what they gave `what` for.

        Args:
            call: The user's, in which this rank is alone.
        """
        asked = {"rank": self._rank, "version": self._subject.version, "request": request}
        others = [r for r in range(len(self._addresses)) if r != self._rank]
        try:
            with contextlib.ExitStack() as stack:
                connections = {r: stack.enter_context(self._ask(r, what, asked)) for r in others}
                yield self._star(self._rank, connections)
        except PeerError as error:
            raise PeerError(
                f"rank {self._rank} called {call} alone, and {error}. Call it on every rank: do "
                "not put it behind `if hvd.rank() == 0`"
            ) from error

    def _star(self, root: int, connections: Mapping[int, Connection]) -> StarCollectives:
        return StarCollectives(self._rank, len(self._addresses), root, connections)

    @contextlib.contextmanager
    def _at(self, wanted: Version) -> Iterator[None]:
        """Hold the subject at this version; a rank may still be at the end of the step before."""
        deadline = limits.Deadline()
        while self._subject.version < wanted and not deadline.passed():
            time.sleep(_POLL / 10)
        with self._subject.guard.reading():
            if self._subject.version != wanted:
                mine = self._subject.version
                raise PeerError(
                    f"rank {self._rank} has made {mine.steps} steps and loaded {mine.loads} times, "
                    f"the rank that asks {wanted.steps} and {wanted.loads}"
                )
            yield

    # -- the end -----------------------------------------------------------------------------------

    def let_go(self) -> None:
        """The owner is gone: give until the first rank has let go as well."""
        if self._rank == 0:
            self.close()
        else:
            _left.add(self)
            self._watch_first()

    def close(self) -> None:
        """Give nothing any more."""
        self._gone.set()
        _left.discard(self)
        for topic in self._topics:
            self._service.withdraw(topic)

    def _stays(self) -> bool:
        """Whether others may need this rank, whose main thread has ended."""
        if self._rank == 0 or _has_failed():
            self.close()
        if self._stay is None:
            self._stay = limits.Deadline()
        if not self._gone.is_set():
            self._watch_first()
        return not self._gone.is_set() and not self._stay.passed()

    def _watch_first(self) -> None:
        if self._watch is None:
            self._watch = threading.Thread(target=self._close_after_first, daemon=True)
            self._watch.start()

    def _close_after_first(self) -> None:
        with contextlib.suppress(ZeroError), self._ask(
            0, "alive", self._subject.version
        ) as connection:
            connection.limit(None)
            connection.hear()
        self.close()

    def _on_alive(self, connection: Connection, request: Any) -> None:
        """Answer when this rank will not ask any more. It cannot, once it is in a step that the
        other one, which has let go, will never take part in."""
        while not self._gone.wait(_POLL):
            if self._subject.is_changing and self._subject.version == Version(*request):
                break
        connection.tell(True)


class _Meeting:
    """Tells ranks that make a call whether all of them do."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._open: dict[str, _Arrivals] = {}

    def arrive(self, call: str, rank: int) -> bool:
        with self._changed:
            mine = self._open.setdefault(call, _Arrivals())
            mine.ranks.add(rank)
            if len(mine.ranks) < self._size:
                self._changed.wait_for(lambda: mine.all_came is not None, mine.seconds_left())
            if mine.all_came is None:
                mine.all_came = len(mine.ranks) == self._size
                del self._open[call]
                self._changed.notify_all()
            return mine.all_came


class _Arrivals:
    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.all_came: bool | None = None
        self._deadline = time.monotonic() + PATIENCE

    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _has_failed() -> bool:
    """Whether the main thread has ended by an exception: nobody can be served by a rank whose
    failure has to be seen by the launcher at once."""
    return getattr(sys, "last_value", None) is not None


# Whose owner is gone on this rank, while the first rank may still ask.
_left: set[Peers] = set()


def find_peers(
    collectives: Collectives,
    hosts: Sequence[str],
    prefix: str,
    subject: Versioned,
    jobs: Mapping[str, Job],
) -> Peers | None:
    """The other ranks, if all can be reached; None everywhere if not. All ranks must call it.

    What was left of earlier optimizers is let go of: a new one may take over their parameters.

    Args:
        hosts: Of all ranks.
        jobs: Per name: this rank's part in `job(collectives, request)`, which runs in another
            thread, while the rank that asks does the same over its own collectives.
    """
    for old in list(_left):
        old.close()
    mine = service(hosts)
    heard = collectives.allgather_object(list(mine.address), name=f"{prefix}/addresses")
    addresses = [Address(*address) for address in heard]
    peers = Peers(collectives.rank, addresses, mine, prefix, subject)
    for what, job in jobs.items():
        peers.give(what, job)
    # The last collective: whoever has passed it may ask at once.
    if all(collectives.allgather_object(_answers(addresses[0]), name=f"{prefix}/reached")):
        return peers
    peers.close()
    return None


def _answers(address: Address) -> bool:
    try:
        with connect(address, HERE, None, who="rank 0", limit=CONNECT_TIMEOUT) as connection:
            return bool(connection.hear())
    except PeerError:
        return False
