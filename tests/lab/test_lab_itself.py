"""The lab is shut off from the world, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import packages
import pytest
from hosts import ROOT, Hosts, environment

HERE = Path(__file__).parent


def processes_with(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in words:
            found.append(words)
    return found


def test_hosts_see_each_other_and_nothing_else(hosts):
    done = hosts["h1"].run(["ssh", "h3", "hostname; ip route"])
    name, route = done.stdout.splitlines()
    assert name == "h3" and route.startswith("10.77.0.0/24 dev eth0"), done.explain()
    off_the_machine = "import socket; socket.create_connection(('198.51.100.1', 80), 5)"
    done = hosts["h1"].run([sys.executable, "-c", off_the_machine])
    assert "Network is unreachable" in done.stderr, done.explain()


def test_each_host_has_its_own_processes_and_memory(hosts):
    hosts["h1"].run(["touch", "/dev/shm/mine"])
    assert not hosts["h2"].run(["test", "-e", "/dev/shm/mine"]).ok
    assert not Path("/dev/shm/mine").exists()
    seen = hosts["h2"].run(["ps", "-e", "-o", "pid="]).stdout.split()
    assert "1" in seen and len(seen) < 30


def test_nothing_is_left_when_the_tests_are_killed(hosts):
    """`hosts` says whether they can be made here."""
    folders = set(Path(tempfile.gettempdir()).glob("zerohvd-lab-*"))
    mark = "86399.25"  # seconds that only this test sleeps for
    process = subprocess.Popen(
        [sys.executable, str(HERE / "hosts.py"), "2", "sleep", mark], cwd=ROOT, env=environment()
    )
    try:
        wait_until(lambda: any(p.startswith("sleep") for p in processes_with(mark)))
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not processes_with(mark))
    wait_until(lambda: set(Path(tempfile.gettempdir()).glob("zerohvd-lab-*")) <= folders)


def wait_until(what) -> None:
    for _ in range(200):
        if what():
            return
        time.sleep(0.05)
    raise AssertionError(processes_with("86399.25"))


def test_where_it_cannot_be_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(packages.os, "geteuid", lambda: 1000)
    with pytest.raises(packages.NotHereError, match="need root"):
        Hosts(1)
    monkeypatch.setenv(packages.SWITCH, "off")
    with pytest.raises(packages.NotHereError, match="ZEROHVD_TEST_LAB=off"):
        Hosts(1)


def test_a_package_that_cannot_be_installed_is_a_reason_too(monkeypatch):
    if packages.os.geteuid() != 0 or packages.shutil.which("apt-get") is None:
        pytest.skip("needs root and apt-get")
    with pytest.raises(packages.NotHereError, match="no-such-package"):
        packages.need({"/no/such/command": "no-such-package"})
