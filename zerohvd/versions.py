"""The versions zerohvd works with, and the question whether they are here.

The adapters call `require_torch()` or `require_keras()` before they import anything, so that a
missing or unfit Horovod is one sentence with a command in it instead of a traceback out of a
compiled library. `zerohvd doctor` shows the same findings as lines of its table.

Nothing is imported to find out: versions come from the installed metadata, and what Horovod was
built for from the libraries that lie in its folders.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

# The floors are the versions of requirements/oldest.txt, with which `make test-oldest` runs the
# suites; docs/versions.md says how they were found.
PYTHON_MINIMUM = (3, 10)
INSTALL_HOROVOD = "zerohvd horovod install"
REINSTALL_HOROVOD = "zerohvd horovod install --force"


@dataclass(frozen=True)
class Supported:
    """A package zerohvd stands on.

    Attributes:
        title: Its name in sentences.
        module: What is imported.
        minimum: The oldest version that works.
        install: The command that brings it.
        because: Why older ones do not do, where that is not plain.
    """

    title: str
    module: str
    minimum: str
    install: str
    because: str = ""

    @property
    def wanted(self) -> str:
        text = f"{self.title} >= {self.minimum}"
        return f"{text} ({self.because})" if self.because else text


HOROVOD = Supported(
    "Horovod", "horovod", "0.27", INSTALL_HOROVOD, because="the first with reducescatter"
)
TORCH = Supported("PyTorch", "torch", "2.6", "pip install 'torch>=2.6'")
TENSORFLOW = Supported("TensorFlow", "tensorflow", "2.16", "pip install 'tensorflow>=2.16'")
KERAS = Supported("Keras", "keras", "3.9", "pip install 'keras>=3.9'")


@dataclass(frozen=True)
class Problem:
    """Something that keeps zerohvd from working: what was found, what is supported, what to do."""

    found: str
    supported: str
    fix: str

    def __str__(self) -> str:
        return f"{self.found}; zerohvd needs {self.supported}. To fix it: {self.fix}"


@dataclass(frozen=True)
class Installed:
    """A package that can be imported here.

    Attributes:
        module: What is imported.
        version: As its metadata says; None for a source tree without metadata.
        distribution: The name it was installed under, such as `tensorflow-cpu`.
        folder: Where its files are.
    """

    module: str
    version: str | None
    distribution: str | None
    folder: Path | None


def require_torch() -> None:
    """Raise ImportError unless `zerohvd.torch` can work here."""
    _require("zerohvd.torch", (*problems_of(TORCH), *horovod_problems("torch")))


def require_keras() -> None:
    """Raise ImportError unless `zerohvd.keras` can work here."""
    _require(
        "zerohvd.keras",
        (
            *problems_of(TENSORFLOW),
            *problems_of(KERAS),
            *backend_problems(keras_backend()),
            *horovod_problems("tensorflow"),
        ),
    )


def _require(adapter: str, problems: Iterable[Problem]) -> None:
    lines = [f"  {problem}" for problem in problems]
    if lines:
        text = "\n".join([f"{adapter} cannot work in this environment:", *lines])
        raise ImportError(f"{text}\n`zerohvd doctor` shows the whole picture.")


def python_problems() -> tuple[Problem, ...]:
    if sys.version_info >= PYTHON_MINIMUM:
        return ()
    found = "Python " + ".".join(map(str, sys.version_info[:3]))
    minimum = ".".join(map(str, PYTHON_MINIMUM))
    return (Problem(found, f"Python >= {minimum}", "create the environment with a newer Python"),)


def problems_of(package: Supported) -> tuple[Problem, ...]:
    """What is wrong with `package` by itself: missing, or too old."""
    return problems_with(package, find(package.module))


def problems_with(package: Supported, installed: Installed | None) -> tuple[Problem, ...]:
    """The same for what `find` said."""
    if installed is None:
        found = f"{package.title} is not installed"
        return (Problem(found, package.wanted, _run(package.install)),)
    if installed.version is not None and not at_least(installed.version, package.minimum):
        found = f"{package.title} {installed.version} is installed"
        command = REINSTALL_HOROVOD if package is HOROVOD else _upgrade(package, installed)
        return (Problem(found, package.wanted, _run(command)),)
    return ()


def horovod_problems(framework: str) -> tuple[Problem, ...]:
    """What is wrong with Horovod for `framework`: missing, too old, or built without it."""
    installed = find("horovod")
    problems = problems_with(HOROVOD, installed)
    built = horovod_frameworks()
    if problems or framework in built:
        return problems
    return (not_built_problem(installed, built, framework),)


def not_built_problem(
    installed: Installed | None, built: tuple[str, ...], framework: str
) -> Problem:
    version = (installed.version if installed else None) or "of unknown version"
    return Problem(
        f"Horovod {version} is installed, but built for {', '.join(built) or 'no framework'}",
        f"a Horovod that was built for {framework}",
        _run(REINSTALL_HOROVOD),
    )


def backend_problems(backend: str) -> tuple[Problem, ...]:
    """What is wrong with Keras' choice of a backend."""
    if backend == "tensorflow":
        return ()
    return (
        Problem(
            f"Keras uses its {backend} backend",
            "the tensorflow backend, the one Horovod can work with",
            "set KERAS_BACKEND=tensorflow before importing keras",
        ),
    )


# -- what is here ---------------------------------------------------------------------------------


def find(module: str) -> Installed | None:
    """`module` as it is installed, or None; does not import it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    # A folder that merely has the right name (no __init__.py) is found too, without an origin.
    if spec is None or spec.origin is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    distribution = _distribution_of(module)
    return Installed(
        module=module,
        version=_metadata_version(distribution) if distribution else None,
        distribution=distribution,
        folder=Path(folders[0]) if folders else None,
    )


def _distribution_of(module: str) -> str | None:
    if _metadata_version(module) is not None:
        return module
    # tensorflow comes as tensorflow-cpu, tensorflow-rocm, tf-nightly and more. The whole search
    # takes a fifth of a second, hence the guess before it.
    names = importlib.metadata.packages_distributions().get(module, [])
    return names[0].replace("_", "-") if names else None


def _metadata_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def at_least(version: str, minimum: str) -> bool:
    """Whether `version` is `minimum` or newer.

    Only the release numbers count: containers ship builds such as 2.1.0a0+32f93b1, which by the
    letter come before 2.1. A version that cannot be read is taken for a build of one's own.
    """
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        return True
    return release >= Version(minimum)


def horovod_libraries() -> dict[str, Path]:
    """Horovod's compiled library per framework it was built for."""
    installed = find("horovod")
    if installed is None or installed.folder is None:
        return {}
    libraries = {}
    for framework in ("torch", "tensorflow"):
        # The torch one is called mpi_lib_v2; both end in the name of the Python they are for.
        for library in sorted((installed.folder / framework).glob("mpi_lib*.so")):
            libraries[framework] = library
    return libraries


def horovod_frameworks() -> tuple[str, ...]:
    """The frameworks that the installed Horovod was built for."""
    return tuple(horovod_libraries())


def horovod_built_against() -> dict[str, str]:
    """The framework versions that were present when Horovod was built, where it recorded them."""
    installed = find("horovod")
    if installed is None or installed.folder is None:
        return {}
    try:
        record = json.loads((installed.folder / "metadata.json").read_text())
    except (OSError, ValueError):
        return {}
    names = {"torch": "pytorch", "tensorflow": "tensorflow"}
    return {ours: str(record[theirs]) for ours, theirs in names.items() if theirs in record}


def keras_backend() -> str:
    """The backend that `import keras` would choose, or has chosen."""
    keras = sys.modules.get("keras")
    if keras is not None:
        return str(keras.config.backend())
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"]
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    try:
        return str(json.loads((home / "keras.json").read_text()).get("backend", "tensorflow"))
    except (OSError, ValueError, AttributeError):
        return "tensorflow"


def _upgrade(package: Supported, installed: Installed) -> str:
    # Under the name it has: `pip install tensorflow` would put its files over tensorflow-cpu's.
    name = installed.distribution or package.module
    return f"pip install '{name}>={package.minimum}'"


def _run(command: str) -> str:
    return f"run `{command}`"
