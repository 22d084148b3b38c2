"""One rank asks, and the others answer, whatever their main threads do."""

from __future__ import annotations

import contextlib
import socket
import threading

import numpy as np
import pytest

from zerohvd.peers import channel, group
from zerohvd.peers.channel import HERE, Address, Connection, PeerError, Service, connect
from zerohvd.peers.group import Guard, Version, find_peers
from zerohvd.testing import ThreadWorld


class Subject:
    """A rank's part of something sharded."""

    def __init__(self, rank):
        self.guard = Guard()
        self.version = Version(0, 0)
        self.is_changing = False
        self.part = np.full(rank, float(rank))  # that of the first rank is empty

    def give(self, collectives, request):
        splits = [0] * collectives.size
        splits[collectives.root] = len(self.part)
        return collectives.alltoall(self.part, splits, name=request["name"])


@contextlib.contextmanager
def joined(c, prefix):
    subject = Subject(c.rank)
    found = find_peers(c, ["one host"] * c.size, prefix, subject, {"part": subject.give})
    try:
        yield subject, found
    finally:
        c.barrier()
        found.close()


def take(subject, found):
    request = {"name": "parts"}
    with found.take("part", "a_call()", request) as star:
        return subject.give(star, request).tolist()


@pytest.mark.parametrize("size", [2, 5, 32])
@pytest.mark.parametrize("asks", ["first", "last"])
def test_a_rank_alone_takes_the_parts_of_all(size, asks):
    rank = 0 if asks == "first" else size - 1

    def live(c):
        with joined(c, f"alone{size}{asks}") as (subject, found):
            return take(subject, found) if c.rank == rank else None

    expected = [float(r) for r in range(size) for _ in range(r)]
    assert ThreadWorld(size).run(live)[rank] == expected


def test_all_ranks_may_take_at_once():
    def live(c):
        with joined(c, "at once") as (subject, found):
            return take(subject, found)

    assert ThreadWorld(4).run(live) == [[1.0, 2.0, 2.0, 3.0, 3.0, 3.0]] * 4


def test_ranks_learn_whether_all_make_a_call(monkeypatch):
    monkeypatch.setattr(group, "PATIENCE", 0.5)

    def live(c):
        with joined(c, "come") as (_, found):
            together = found.all_come("state_dict()")
            c.barrier()
            alone = found.all_come("state_dict()") if c.rank == 1 else None
            c.barrier()
            some = found.all_come("state_dict()") if c.rank != 1 else None
            return together, alone, some

    first, second = (True, None, False), (True, False, None)
    assert ThreadWorld(3).run(live) == [first, second, first]


def test_what_a_rank_gives_is_of_the_step_that_is_asked_for():
    def live(c):
        with joined(c, "steps") as (subject, found):
            late = threading.Event()
            if c.rank == 1:  # it is at the end of a step that the others have made

                def finish():
                    late.wait(0.3)
                    subject.part = np.array([7.0])
                    subject.version = Version(1, 0)

                threading.Thread(target=finish).start()
            else:
                subject.version = Version(1, 0)
            return take(subject, found) if c.rank == 0 else None

    assert ThreadWorld(2).run(live)[0] == [7.0]


def test_values_of_another_version_are_refused():
    def live(c):
        with joined(c, "loads") as (subject, found):
            subject.version = Version(0, c.rank)
            c.barrier()
            if c.rank == 0:
                with pytest.raises(PeerError, match="rank 1 has failed: rank 1 has made 0 steps"):
                    take(subject, found)

    ThreadWorld(2).run(live)


def test_what_a_rank_leaves_is_there_until_the_first_rank_lets_go():
    def live(c):
        subject = Subject(c.rank)
        found = find_peers(c, ["one host"] * c.size, "left", subject, {"part": subject.give})
        c.barrier()
        if c.rank == 1:
            found.let_go()
        c.barrier()
        taken = take(subject, found) if c.rank == 0 else None
        if c.rank == 0:
            found.let_go()
            with pytest.raises(PeerError, match="rank 1 has let go"):
                for _ in range(100):
                    take(subject, found)
                    threading.Event().wait(0.05)
        return taken

    assert ThreadWorld(2).run(live) == [[1.0], None]


def test_a_rank_that_is_gone_is_named():
    def live(c):
        with joined(c, "gone") as (subject, found):
            if c.rank == 1:
                found.close()
            c.barrier()
            if c.rank == 0:
                with pytest.raises(PeerError, match="rank 1 has let go of it"):
                    take(subject, found)

    ThreadWorld(2).run(live)


def test_strangers_are_not_answered():
    service = channel.service(["here"])
    said = []
    service.offer("secret", lambda connection, request: said.append(request))
    wrong = Address(service.address.hosts, service.address.port, "00" * 32)
    with pytest.raises(PeerError, match="rank 3 cannot be reached"), connect(
        wrong, "secret", None, who="rank 3", limit=5
    ) as connection:
        connection.hear()
    with socket.create_connection((service.address.hosts[0], service.address.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with contextlib.suppress(OSError):
            while sock.recv(1000):
                pass
    assert said == []
    with connect(service.address, HERE, None, who="rank 3", limit=5) as connection:
        assert connection.hear() is True
    service.withdraw("secret")


def test_an_address_that_is_anothers_is_passed_over():
    """Docker's bridge has one address on all hosts, and a port may be anybody's there."""
    other = Service(loopback=True)
    service = channel.service(["here"])
    both = Address(["127.0.0.2", *service.address.hosts], service.address.port, service.address.key)
    with connect(both, HERE, None, who="rank 3", limit=5) as connection:
        assert isinstance(connection, Connection)
        assert connection.hear() is True
    assert other.address.key != service.address.key
