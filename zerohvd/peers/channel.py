"""A channel between processes besides Horovod: one rank asks, a thread of another one answers.

A collective needs the main thread of every rank. A rank that alone wants something of the others,
which may be in a collective of the user's, at a barrier or at the end of the script, would wait for
ever. So every process listens on a TCP port, in a thread of its own. Peers know its key from a
collective, and both sides prove that they do before anything else is said: a port number that
another process has, or an address that another host has too, is found out.

The thread outlives the main one for as long as there is something that others may still ask for.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from zerohvd.errors import ZeroError

CONNECT_TIMEOUT = 5.0
_POLL = 0.2  # seconds between two looks at whether the process has ended
_LENGTH = struct.Struct(">Q")
_ERROR = "error"
HERE = "here"  # a topic that every service answers
_PROOF = 32  # bytes, of a nonce and of an HMAC-SHA256


class PeerError(ZeroError):
    """Another rank could not be reached, or could not answer."""


class Address(NamedTuple):
    """Where a process listens, and the key that both sides of a connection prove to know."""

    hosts: list[str]
    port: int
    key: str


class Connection:
    """Messages over a socket: bytes, or anything that JSON can say."""

    def __init__(self, sock: socket.socket, who: str = "a rank") -> None:
        self._socket, self._who = sock, who
        # Small messages go back and forth: waiting to fill a packet costs 40 ms for each.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def limit(self, seconds: float | None) -> None:
        """Give up when nothing can be sent or received for this long; None: never."""
        self._socket.settimeout(seconds)

    def send(self, data: bytes | memoryview) -> None:
        self._socket.sendall(_LENGTH.pack(len(data)))
        self._socket.sendall(data)

    def receive(self) -> bytearray:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def tell(self, value: Any) -> None:
        self.send(json.dumps(value).encode())

    def hear(self) -> Any:
        """What the other side has told; raise PeerError if that is an error."""
        said = json.loads(self.receive())
        if isinstance(said, dict) and _ERROR in said:
            raise PeerError(f"{self._who} {said[_ERROR]}")
        return said

    def prove(self, key: bytes, *, listens: bool) -> None:
        """Let both sides prove that they know the key; raise OSError if the other does not."""
        ours, theirs = (b"listens", b"asks") if listens else (b"asks", b"listens")
        nonce = secrets.token_bytes(_PROOF)
        self._socket.sendall(nonce)
        challenge = self._exactly(_PROOF)
        self._socket.sendall(hmac.digest(key, ours + challenge, "sha256"))
        if not hmac.compare_digest(
            self._exactly(_PROOF), hmac.digest(key, theirs + nonce, "sha256")
        ):
            raise OSError("the other side of the connection does not know the key")

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise OSError("the other side has closed the connection")
            view = view[received:]
        return data


Handler = Callable[[Connection, Any], None]


class Service:
    """Answers other ranks in threads of its own.

    Args:
        loopback: Listen to processes of this host only.
    """

    def __init__(self, *, loopback: bool) -> None:
        key = secrets.token_bytes(_PROOF)
        self._topics: dict[str, Handler] = {HERE: _greet}
        self._server = _Server(("127.0.0.1" if loopback else "", 0), key, self._topics)
        hosts = ["127.0.0.1"] if loopback else _own_addresses()
        self.address = Address(hosts, self._server.server_address[1], key.hex())
        self._stay: dict[str, Callable[[], bool]] = {}
        # No daemon: it has to answer after the main thread has come to its end.
        threading.Thread(target=self._listen, name="zerohvd-peers", daemon=False).start()

    def offer(
        self, topic: str, handler: Handler, stay: Callable[[], bool] | None = None
    ) -> None:
        """Answer requests about `topic` with `handler(connection, request)`, in another thread.

        Args:
            stay: Asked again and again once the main thread has ended: whether to go on answering.
        """
        self._topics[topic] = handler
        if stay is not None:
            self._stay[topic] = stay

    def withdraw(self, topic: str) -> None:
        self._topics.pop(topic, None)
        self._stay.pop(topic, None)

    def _listen(self) -> None:
        self._server.timeout = _POLL
        while threading.main_thread().is_alive() or self._is_needed():
            self._server.handle_request()
        self._server.server_close()

    def _is_needed(self) -> bool:
        asked = [stay() for stay in list(self._stay.values())]
        return any(asked) or self._server.answering > 0


def _greet(connection: Connection, request: Any) -> None:
    connection.tell(True)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, place: tuple[str, int], key: bytes, topics: dict[str, Handler]) -> None:
        self.answering = 0
        self._key, self._topics = key, topics
        self._lock = threading.Lock()
        super().__init__(place, socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        connection = Connection(request)
        # OSError, ValueError: a stranger, or a rank that has ended. ZeroError: told by now.
        with contextlib.suppress(OSError, ValueError, ZeroError):
            connection.limit(CONNECT_TIMEOUT)
            connection.prove(self._key, listens=True)
            asked = connection.hear()
            with self._counted():
                self._answer(connection, **asked)

    def _answer(self, connection: Connection, topic: str, request: Any, limit: float) -> None:
        connection.limit(limit)
        handler = self._topics.get(topic)
        if handler is None:
            connection.tell({_ERROR: "has let go of it"})
            return
        try:
            handler(connection, request)
        except OSError:
            raise  # there is nobody to tell
        except Exception as error:
            connection.tell({_ERROR: f"has failed: {error}"})
            raise

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self.answering += 1
        try:
            yield
        finally:
            with self._lock:
                self.answering -= 1


@contextlib.contextmanager
def connect(
    address: Address, topic: str, request: Any, *, who: str, limit: float
) -> Iterator[Connection]:
    """Ask the process at `address` about `topic`; what is said then is up to its handler.

    Args:
        who: The process, in errors.

    Raises:
        PeerError: It cannot be reached, or the connection breaks inside of the block.
    """
    try:
        with _reach(address) as sock:
            connection = Connection(sock, who)
            connection.limit(limit)
            connection.tell({"topic": topic, "request": request, "limit": limit})
            yield connection
    except TimeoutError as error:
        raise PeerError(f"{who} has not answered for {limit:g} s") from error
    except OSError as error:
        raise PeerError(f"{who} cannot be reached: {error}") from error


def _reach(address: Address) -> socket.socket:
    """A connection to the process itself, by whichever of its addresses leads there."""
    failure: OSError = OSError("it has no address")
    for host in address.hosts:
        sock = None
        try:
            sock = socket.create_connection((host, address.port), CONNECT_TIMEOUT)
            Connection(sock).prove(bytes.fromhex(address.key), listens=False)
            return sock
        except OSError as error:
            failure = error
            if sock is not None:
                sock.close()
    raise failure


def _own_addresses() -> list[str]:
    """The IPv4 addresses of this host, that of its name first."""
    import psutil  # with every Horovod; only several hosts need it

    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        found = [a for a in (named, *found) if not a.startswith("127.")]
    return list(dict.fromkeys(found))


_services: dict[tuple[int, bool], Service] = {}


def service(hosts: Sequence[str]) -> Service:
    """This process's service for ranks on these hosts; one for all optimizers."""
    # By process: a fork has the object, but not the thread.
    which = os.getpid(), len(set(hosts)) == 1
    if which not in _services:
        _services[which] = Service(loopback=which[1])
    return _services[which]
