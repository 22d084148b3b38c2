"""Hosts on one machine: each has its own address, name, processes, /run and /dev/shm, and an sshd.

    with Hosts(3) as hosts:
        hosts["h1"].run(["ssh", "h2", "hostname"], timeout=10)
        hosts.rate("1gbit")
        hosts["h2"].cut()

A host is a process in namespaces of its own (network, UTS, mount, PID, IPC); a bridge in another
network namespace joins them. No host has a way out: what runs there can send nothing off the
machine. The process of a host ends when its pipe is closed, also by the death of the tests, and the
kernel ends all others of its PID namespace with it: nothing is left behind. No file outside the
lab's own folder is written.

Open MPI tells hosts apart by name: without a UTS namespace two of them would talk through shared
memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import packages

from zerohvd.launching import LaunchResult, launch_environment, run_to_the_end

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ("net", "uts", "mount", "pid", "ipc")
SSHD = """\
HostKey {folder}/hostkey
PermitRootLogin prohibit-password
AuthorizedKeysFile {folder}/key.pub
PasswordAuthentication no
UsePAM no
StrictModes no
MaxStartups 100
PidFile /run/sshd.pid
"""
SSH = """\
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
# The first process of a host. It ends, and all others with it, when nobody holds its pipe any more;
# if the tests were killed, nobody else would remove the folder.
FIRST = """\
set -e
hostname {name}
mount -t tmpfs run /run
mount -t tmpfs shm /dev/shm
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh /etc/ssh
ip link set lo up
mkdir -p /run/sshd /run/munge
/usr/sbin/sshd -f {folder}/sshd_config -E {folder}/sshd.{name}.log
echo up
exec 1>&-
cat > /dev/null
rm -rf {folder}
"""


class Host:
    """One of the hosts.

    Attributes:
        name, address: As the others know it.
        pid: Its first process, as this machine counts.
    """

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        unshare = ["unshare", *(f"--{n}" for n in NAMESPACES), "--mount-proc", "--fork"]
        script = FIRST.format(name=name, folder=folder)
        self._process = subprocess.Popen(
            [*unshare, "--kill-child", "bash", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stderr is not None
        if self._process.stdout.readline() != "up\n":
            self._process.kill()
            raise packages.NotHereError(
                f"a host (namespaces) cannot be made here: {self._process.stderr.read().strip()}"
            )
        self.pid = _child_of(self._process.pid)

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv`, to be run on this host, in the current folder."""
        enter = ["nsenter", f"--target={self.pid}", *(f"--{n}" for n in NAMESPACES)]
        return [*enter, f"--wd={Path.cwd()}", *argv]

    def run(
        self, argv: Sequence[str], *, timeout: float = 60, env: Mapping[str, str] | None = None
    ) -> LaunchResult:
        return run_to_the_end(
            self.command(argv), timeout=timeout, env={**environment(), **(env or {})}, cwd=ROOT
        )

    def start(
        self, argv: Sequence[str], output: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start `argv` in a session of its own, as `zerohvd.launching.end_session` wants it."""
        with output.open("w") as file:
            return subprocess.Popen(
                self.command(argv), stdin=subprocess.DEVNULL, stdout=file, stderr=file, text=True,
                env={**environment(), **(env or {})}, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def in_network(self, *argv: str) -> None:
        """Run a command of this machine on the network of this host."""
        in_network(self.pid, *argv)

    def cut(self) -> None:
        """Pull the cable: nobody is told."""
        self.in_network("ip", "link", "set", "eth0", "down")

    def mend(self) -> None:
        self.in_network("ip", "link", "set", "eth0", "up")

    def sent(self) -> int:
        """Bytes that have left this host."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            if line.strip().startswith("eth0:"):
                return int(line.split(":")[1].split()[8])
        raise KeyError("eth0")

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Hosts:
    """Hosts h1, h2, ... and the switch between them."""

    def __init__(self, count: int) -> None:
        packages.need(packages.OF_NAMESPACES)
        _try_namespaces()
        packages.need(packages.OF_HOSTS)
        self.folder = Path(tempfile.mkdtemp(prefix="zerohvd-lab-"))
        self._hosts: dict[str, Host] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        try:
            self._write(count)
            self._start(count)
        except BaseException:
            self.stop()
            raise

    def _write(self, count: int) -> None:
        (self.folder / "ssh").mkdir()
        for name in ("key", "hostkey"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)],
                check=True,
            )
        (self.folder / "sshd_config").write_text(SSHD.format(folder=self.folder))
        (self.folder / "ssh" / "ssh_config").write_text(SSH.format(folder=self.folder))
        lines = [f"{_address(i)} h{i}" for i in range(1, count + 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def _start(self, count: int) -> None:
        self._switch = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
        switch = self._switch.pid
        _wait_for_network(switch)
        in_network(switch, "ip", "link", "add", "bridge", "type", "bridge")
        in_network(switch, "ip", "link", "set", "bridge", "up")
        for i in range(1, count + 1):
            host = self._hosts[f"h{i}"] = Host(f"h{i}", _address(i), self.folder)
            link = ["ip", "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0"]
            in_network(switch, *link, "netns", str(host.pid))
            in_network(switch, "ip", "link", "set", f"port{i}", "master", "bridge", "up")
            host.in_network("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.in_network("ip", "link", "set", "eth0", "up")

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def rate(self, rate: str | None) -> None:
        """Limit both directions of every link, as in "1gbit"; None: no limit."""
        assert self._switch is not None
        for i, host in enumerate(self, start=1):
            for pid, device in ((host.pid, "eth0"), (self._switch.pid, f"port{i}")):
                tc = ["tc", "qdisc", "replace", "dev", device, "root"]
                tbf = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"] if rate else []
                in_network(pid, *tc, *(tbf or ["pfifo"]))

    def stop(self) -> None:
        for host in self:
            host.stop()
        if self._switch is not None and self._switch.stdin is not None:
            self._switch.stdin.close()
            self._switch.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def environment() -> dict[str, str]:
    """What jobs on hosts get: this source, and no trace of a launcher around the tests."""
    foreign = ("OMPI_COMM_", "PMI", "SLURM", "HOROVOD_", "ZEROHVD_TEST")
    env = {k: v for k, v in launch_environment().items() if not k.startswith(foreign)}
    return {**env, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def in_network(pid: int, *argv: str) -> None:
    done = subprocess.run(
        ["nsenter", f"--target={pid}", "--net", *argv], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise packages.NotHereError(f"`{' '.join(argv)}`: {done.stderr.strip()}")


def _try_namespaces() -> None:
    """Before anything is installed for them: containers may not allow any."""
    argv = ["unshare", *(f"--{n}" for n in NAMESPACES), "--mount-proc", "--fork", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise packages.NotHereError(f"namespaces are not allowed here: {done.stderr.strip()}")


def _address(i: int) -> str:
    return f"10.77.0.{i}"


def _wait_for_network(pid: int) -> None:
    """Until `unshare` has made the namespace: before, commands would change this machine's."""
    ours = os.readlink("/proc/self/ns/net")
    for _ in range(200):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/net") != ours:
                return
        time.sleep(0.02)
    raise packages.NotHereError("a network namespace cannot be made here")


def _child_of(pid: int) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == pid:
                return int(entry.name)
    raise packages.NotHereError(f"process {pid} has no child")


if __name__ == "__main__":  # python tests/lab/hosts.py N COMMAND ...: on the first of N hosts
    with Hosts(int(sys.argv[1])) as lab:
        sys.exit(subprocess.run(lab["h1"].command(sys.argv[2:]), env=environment()).returncode)
