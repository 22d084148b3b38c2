"""Starting a job again when it fails, on the hosts that are left."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zerohvd.elastic import keeper
from zerohvd.elastic.rejoin import RESTART_VARIABLE
from zerohvd.elastic.state import JOB_VARIABLE
from zerohvd.elastic.store import Store
from zerohvd.launching import end_session, sigterm_raises
from zerohvd.preemption.departure import EXIT_CODE

MEMORY = Path("/dev/shm")
PROBE = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host} true"
_PROBE_SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """What to start, and how often.

    Args:
        command: With `{np}` and `{hosts}` in it where hosts are given.
        restarts: How often to start it again after a failure.
        hosts: Name -> ranks there; empty: the command knows by itself.
        min_np: With fewer ranks than these the job ends.
        probe: A command that says by its exit code whether `{host}` is alive.
        memory: A folder on tmpfs.
    """

    command: Sequence[str]
    restarts: int = 0
    hosts: Mapping[str, int] | None = None
    min_np: int = 1
    probe: str = PROBE
    memory: Path = MEMORY


def parse_hosts(text: str) -> dict[str, int]:
    """`a:4,b:4` as host -> ranks."""
    found: dict[str, int] = {}
    for part in text.split(","):
        host, _, ranks = part.strip().partition(":")
        if not host or not (ranks or "1").isdecimal() or int(ranks or "1") < 1 or host in found:
            raise ValueError(f"hosts must look like a:4,b:4, each host once, got {text!r}")
        found[host] = int(ranks or "1")
    return found


def fill_in(command: Sequence[str], hosts: Mapping[str, int]) -> list[str]:
    """The command with its `{np}` and `{hosts}` replaced."""
    slots = ",".join(f"{host}:{ranks}" for host, ranks in hosts.items())
    np = str(sum(hosts.values()))
    return [word.replace("{np}", np).replace("{hosts}", slots) for word in command]


def run(job: Job, say: Callable[[str], None]) -> int:
    """Run a job, again and again if it fails; returns the exit code of the last start.

    Args:
        job: The job.
        say: Told what happens, in lines for people.
    """
    folder = job.memory / f"zerohvd-{os.getuid()}-{secrets.token_hex(6)}"
    own = Store(folder / socket.gethostname())
    own.open()
    keeper.start(own.folder)
    try:
        return _run(job, folder, say)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # under whatever names this machine was known


def _run(job: Job, folder: Path, say: Callable[[str], None]) -> int:
    hosts = dict(job.hosts or {})
    code = 1
    for restart in range(job.restarts + 1):
        command = list(job.command)
        if hosts:
            # A host that was lost is asked again: it may have come back.
            left = alive(list(hosts), job.probe)
            if left != set(hosts):
                say(f"does not answer: {', '.join(sorted(set(hosts) - left))}")
            usable = {host: ranks for host, ranks in hosts.items() if host in left}
            if sum(usable.values()) < max(job.min_np, 1):
                say(f"{sum(usable.values())} ranks are left, of at least {max(job.min_np, 1)}")
                return code
            command = fill_in(command, usable)
        code = _start(command, folder, restart)
        if code in (0, EXIT_CODE):  # a job that was asked to leave has saved: its time is up
            return code
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if restart < job.restarts:
            say(f"the job ended with {how}: starts it again ({restart + 1} of {job.restarts})")
        else:
            say(f"the job ended with {how}, after {job.restarts} restarts")
    return code


def _start(command: Sequence[str], folder: Path, restart: int) -> int:
    """Run the launcher, and leave none of its processes behind."""
    env = {**os.environ, JOB_VARIABLE: str(folder), RESTART_VARIABLE: str(restart)}
    try:
        process = subprocess.Popen(list(command), env=env, start_new_session=True)
    except OSError as error:
        print(f"error: cannot start {shlex.join(command)}: {error}", file=sys.stderr)
        return 127
    try:
        with sigterm_raises(), _passing_on(process):
            process.wait()
    finally:
        end_session(process)
    return process.returncode


@contextlib.contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let schedulers' warnings reach the launcher, which passes them on; they would end this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda n, _: process.send_signal(n))
        for number in (signal.SIGUSR1, signal.SIGUSR2)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_alive(host: str, probe: str = PROBE) -> bool:
    """Whether ranks can be started on a host."""
    if host in ("localhost", socket.gethostname()) and probe == PROBE:
        return True
    argv = shlex.split(probe.replace("{host}", host))
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def alive(hosts: Sequence[str], probe: str) -> set[str]:
    """Those of the hosts that answer; all are asked at once."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        answers = pool.map(lambda host: is_alive(host, probe), hosts)
        return {host for host, answer in zip(hosts, answers, strict=True) if answer}
