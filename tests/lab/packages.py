"""Debian's packages that the lab needs: looked for, installed once where that is harmless, or told.

Nothing is installed on a machine that runs systemd: an sshd or a slurmd would start there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SWITCH = "ZEROHVD_TEST_LAB"  # =off: no test of the lab runs, nothing is installed
_SECONDS = 240
_ENVIRONMENT = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}

PMIX = "libpmix.so"

# Command -> package.
OF_NAMESPACES = {"unshare": "util-linux", "nsenter": "util-linux"}
OF_HOSTS = {
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "tc": "iproute2",
}
OF_SLURM = {
    "/usr/sbin/slurmctld": "slurmctld",
    "/usr/sbin/slurmd": "slurmd",
    "srun": "slurm-client",
    "/usr/sbin/munged": "munge",
    # Slurm loads libpmix.so, the link of the development package, for `srun --mpi=pmix`.
    PMIX: "libpmix-dev",
}


class NotHereError(Exception):
    """What this machine lacks for the lab: the reason of a skipped test."""


def need(table: dict[str, str]) -> None:
    """Install what of `table` is missing; raise `NotHereError` where that cannot be done."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no"):
        raise NotHereError(f"{SWITCH}={os.environ[SWITCH]}")
    if os.geteuid() != 0:
        raise NotHereError("hosts of their own (namespaces) need root")
    with _alone():
        missing = sorted({table[c] for c in table if not _is_here(c)})
        if missing:
            _install(missing)
        left = [command for command in table if not _is_here(command)]
    if left:
        raise NotHereError(
            f"installed {', '.join(missing)}, and {', '.join(left)} is still missing"
        )


def extract(package: str, folder: Path) -> None:
    """Unpack a package below `folder`, without installing it."""
    if shutil.which("apt-get") is None:
        raise NotHereError(f"no apt-get to fetch {package} with")
    folder.mkdir(parents=True, exist_ok=True)
    _apt("download", package, cwd=folder)
    for file in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(file), str(folder)], check=True)


def _is_here(command: str) -> bool:
    if command == PMIX:
        return any(Path("/usr/lib").glob(f"*/pmix2/lib/{PMIX}"))
    return shutil.which(command) is not None


def _install(packages: list[str]) -> None:
    by_hand = f"apt-get install {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise NotHereError(
            f"needs Debian's packages {', '.join(packages)}, and there is no apt-get"
        )
    if Path("/run/systemd/system").exists():
        raise NotHereError(f"installing would start services of systemd; do it by hand: {by_hand}")
    _apt("install", "-y", "--no-install-recommends", *packages)


def _apt(*words: str, cwd: Path | None = None) -> None:
    """Run apt-get; with stale or absent lists of packages, once more after an update."""
    for attempt in ([words], [("update",), words]):
        failed = next((f for f in (_failure(w, cwd) for w in attempt) if f), "")
        if not failed:
            return
    raise NotHereError(f"`apt-get {' '.join(words)}` failed: {failed}")


def _failure(words: tuple[str, ...], cwd: Path | None) -> str:
    command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=1", *words]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=_ENVIRONMENT, capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else (lines or ["no reason given"])[-1]


@contextmanager
def _alone() -> Iterator[None]:
    """Of several test runs on this machine, one installs."""
    with Path(tempfile.gettempdir(), "zerohvd-lab.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
