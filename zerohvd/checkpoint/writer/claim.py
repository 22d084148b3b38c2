"""Who may write a checkpoint: one job at a time, and nobody waits for a dead one.

A save holds the file `<name>.saving` beside the checkpoint, made by O_EXCL, which every file system
decides for one of two hosts (flock is not known to other hosts everywhere). It says who holds it,
and a thread counts up in it while the save lasts. A process of this machine is looked up; of one
elsewhere, whose claim has stopped counting, is known after a while that it is dead.

That a checkpoint is whole does not hang on it: folders have names of their own, and one rename
decides. A claim keeps the second of two jobs from writing for nothing and from replacing what the
first has just stored, and tells it why.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from zerohvd.checkpoint import format as fmt
from zerohvd.checkpoint.errors import CheckpointError, cannot

# How often a holder shows that it lives, and how long its silence must be for it to be dead. A
# file server that hangs, hangs for both.
BEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0
_LOOK_SECONDS = 0.2


class Holder(NamedTuple):
    """Who holds a claim, as the file says."""

    id: str  # of the save
    host: str
    pid: int
    since: str
    place: str  # where this pid is known: machine, its last start, namespace
    started: str  # when the process was, so that a pid that is used again is told apart
    beats: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_here(self) -> bool:
        return bool(self.place) and self.place == _place()

    def is_alive_here(self) -> bool:
        return self.started != "" and _started(self.pid) == self.started


_UNKNOWN = Holder("", "an unknown host", 0, "just now", "", "", 0)


class Claim:
    """The right to write the checkpoint `path`; made by `take`."""

    def __init__(self, path: Path, save_id: str) -> None:
        self.path, self.id = path, save_id
        self._file = fmt.claim_path(path)
        since = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        pid = os.getpid()
        self._holder = Holder(
            save_id, socket.gethostname(), pid, since, _place(), _started(pid), 0
        )
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._fd = -1  # of the file that was made here: a later one of the same name is not ours

    @classmethod
    def take(cls, path: Path, save_id: str) -> Claim:
        """Raise unless nobody who is alive is saving at `path`."""
        claim = cls(path, save_id)
        while not claim._made():
            found = holder(path)
            if found is not None and _lives(path, found):
                raise CheckpointError(
                    f"{path} is being saved by another job ({found}): let it finish, or save "
                    "under another name"
                )
            if found is not None:
                _put_aside(path, found, save_id)
        with contextlib.suppress(RuntimeError):  # Python is about to end: no more threads
            threading.Thread(target=claim._beat, name="zerohvd claim", daemon=True).start()
        return claim

    def _made(self) -> bool:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._file, flags, 0o666)
        except FileExistsError:
            return False
        except OSError as error:
            raise cannot("make", self._file, error) from error
        try:
            self._write(0)
        except OSError as error:
            self._close()
            self._file.unlink(missing_ok=True)
            raise cannot("write", self._file, error) from error
        return True

    def _write(self, beats: int) -> None:
        os.pwrite(self._fd, _text(self._holder._replace(beats=beats)), 0)
        os.fsync(self._fd)  # so that other hosts see it now

    def _beat(self) -> None:
        beats = 0
        while not self._end.wait(BEAT_SECONDS):
            beats += 1
            with self._lock, contextlib.suppress(OSError):
                if self._fd >= 0:
                    self._write(beats)

    def _close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def check(self) -> None:
        """Raise if somebody has taken this process for dead, and the claim."""
        found = holder(self.path)
        if found is None or found.id != self.id:
            by = f": {found} is saving it now" if found is not None else ""
            raise CheckpointError(
                f"{self.path} is not saved: this process was silent for so long that another job "
                f"took its place{by}"
            )

    def release(self) -> None:
        self._end.set()
        self._close()
        with contextlib.suppress(CheckpointError):  # what cannot be read now is stale soon
            self._unlink()

    def _unlink(self) -> None:
        found = holder(self.path)
        if found is not None and found.id == self.id:
            self._file.unlink(missing_ok=True)


def holder(path: Path) -> Holder | None:
    """Who says to be saving at `path`; None: nobody."""
    return _said(fmt.claim_path(path))


def _said(file: Path) -> Holder | None:
    try:
        # Opened anew each time: then a network file system asks its server.
        found = Holder(**json.loads(file.read_bytes()))
        known = all(type(a) is type(b) for a, b in zip(found, _UNKNOWN, strict=True))
        return found if known else _UNKNOWN
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cannot("read", file, error) from error
    except (ValueError, TypeError, RecursionError):
        return _UNKNOWN  # it is being written, or was when its process died


def may_live(path: Path, save_id: str) -> bool:
    """Whether the save `save_id` of `path` is perhaps under way; asks nobody to wait."""
    found = holder(path)
    if found is None or found.id not in ("", save_id):
        return False
    return found.is_alive_here() if found.is_here() else True


def remove_dead_claim(file: Path) -> None:
    """Remove a claim, if `file` is one, of a process of this machine that is no more."""
    path = file.with_name(file.name.removesuffix(fmt.CLAIM))
    if file.name in ("", path.name):
        return
    found = holder(path)
    if found is not None and found.is_here() and not found.is_alive_here():
        _put_aside(path, found, secrets.token_hex(8))


def _lives(path: Path, found: Holder) -> bool:
    """Whether the holder does something; of one elsewhere it takes time to know."""
    if found.is_here():
        return found.is_alive_here()
    end = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
        now = holder(path)
        if now is None:
            return False  # it has finished
        if now != found:
            if found.id not in ("", now.id) or now.is_here():
                return _lives(path, now)
            return True
    return False


def _put_aside(path: Path, dead: Holder, save_id: str) -> None:
    """Remove a dead job's claim; that of a third job, which did the same first, stays."""
    if holder(path) != dead:
        return
    aside = fmt.claim_path(path, save_id)
    try:
        os.rename(fmt.claim_path(path), aside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot("remove", fmt.claim_path(path), error) from error
    with contextlib.suppress(OSError, CheckpointError):
        if _said(aside) != dead:
            os.link(aside, fmt.claim_path(path))  # unless there is a new one already
    aside.unlink(missing_ok=True)


def _text(of: Holder) -> bytes:
    # Of one length: a beat overwrites the last one without a moment of half a text.
    fields: dict[str, Any] = of._asdict()
    return json.dumps(fields).encode().ljust(600) + b"\n"


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process was started, in ticks since the machine was; empty: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
