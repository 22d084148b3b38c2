"""From findings to lines: what each finding means, and what to do about it.

Pure: everything that is looked at comes in as an `Evidence`, so that tests can show the doctor a
cluster it has never been on.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zerohvd import cores, rank_count, versions
from zerohvd.launchers import Launcher
from zerohvd.tools.doctor.gpus import gpu_lines
from zerohvd.tools.doctor.machine import Machine, yields_when_idle
from zerohvd.tools.doctor.probes import Finding, Findings
from zerohvd.tools.doctor.report import Line, Status

YIELD = f"{cores.YIELD}=1"
_TITLES = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL", "cuda": "CUDA", "rocm": "ROCm"}
_NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


@dataclass(frozen=True)
class Evidence:
    """All that the doctor looked at.

    Attributes:
        installed: What `versions.find` said, by module; None for what is not there.
        horovod_built: Framework -> the version Horovod was built against ("" if not recorded).
        findings: What the probes found, by part.
        mpirun: The launcher that fits Horovod, or the sentence that says why there is none.
        ranks: How many ranks `--run` is about to start; 0 without it.
    """

    launcher: Launcher
    machine: Machine
    installed: Mapping[str, versions.Installed | None] = field(default_factory=dict)
    horovod_built: Mapping[str, str] = field(default_factory=dict)
    keras_backend: str = "tensorflow"
    findings: Findings = field(default_factory=dict)
    mpirun: Path | str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0

    def has(self, module: str) -> bool:
        return self.installed.get(module) is not None

    def version(self, module: str) -> str:
        installed = self.installed.get(module)
        return (installed.version if installed else None) or "of unknown version"

    @property
    def libmpi(self) -> str | None:
        """The MPI library Horovod loaded."""
        for framework in _NAMES:
            finding = self.findings.get(f"horovod.{framework}")
            if finding is not None and finding.data.get("libmpi"):
                return str(finding.data["libmpi"][0])
        return None


def diagnose(evidence: Evidence) -> Iterator[Line]:
    """The lines of the report, in their order."""
    yield _python_line()
    yield _framework_line(evidence, versions.TORCH, other="tensorflow")
    yield _framework_line(evidence, versions.TENSORFLOW, other="torch")
    yield _keras_line(evidence)
    yield from _horovod_lines(evidence)
    yield from gpu_lines(evidence.findings)
    yield from _mpi_lines(evidence)
    yield _launcher_line(evidence)
    yield from _world_lines(evidence)
    yield Line("machine", Status.OK, str(evidence.machine))
    yield from _idle_lines(evidence)


# -- frameworks -----------------------------------------------------------------------------------


def _python_line() -> Line:
    for problem in versions.python_problems():
        return _from_problem("Python", Status.FAIL, problem)
    return Line("Python", Status.OK, platform.python_version())


def _framework_line(evidence: Evidence, package: versions.Supported, *, other: str) -> Line:
    """PyTorch or TensorFlow: one of them is enough, both are fine."""
    name = package.title
    problems = versions.problems_with(package, evidence.installed.get(package.module))
    if problems and evidence.has(other):
        absent = not evidence.has(package.module)
        return _from_problem(name, Status.INFO if absent else Status.WARN, problems[0])
    if problems:
        return _from_problem(name, Status.FAIL, problems[0])
    finding = evidence.findings.get(package.module)
    if finding is None or not finding.ok:
        fix = f"run `{package.install}`, and try `python -c 'import {package.module}'`"
        return Line(name, Status.FAIL, _cannot(f"import {package.module}", finding), fix)
    gpus = finding.data.get("gpus", 0)
    kind = f"{finding.data.get('kind', '?')} build"
    return Line(name, Status.OK, f"{finding.data['version']} ({kind}, {gpus} GPUs)")


def _keras_line(evidence: Evidence) -> Line:
    bad = Status.WARN if evidence.has("torch") else Status.FAIL
    if not evidence.has("keras") and not evidence.has("tensorflow"):
        return Line("Keras", Status.INFO, "not installed; comes with TensorFlow")
    for problem in versions.problems_with(versions.KERAS, evidence.installed.get("keras")):
        return _from_problem("Keras", bad, problem)
    if not evidence.has("tensorflow"):
        found = f"{evidence.version('keras')}, without TensorFlow: not of use to zerohvd.keras"
        return Line("Keras", Status.INFO, found)
    for problem in versions.backend_problems(evidence.keras_backend):
        return _from_problem("Keras", bad, problem)
    finding = evidence.findings.get("keras")
    if finding is None or not finding.ok:
        fix = f"run `{versions.KERAS.install}`, and try `python -c 'import keras'`"
        return Line("Keras", Status.FAIL, _cannot("import keras", finding), fix)
    found = f"{finding.data['version']} ({finding.data['backend']} backend)"
    return Line("Keras", Status.OK, found)


# -- Horovod and MPI ------------------------------------------------------------------------------


def _horovod_lines(evidence: Evidence) -> Iterator[Line]:
    problems = versions.problems_with(versions.HOROVOD, evidence.installed.get("horovod"))
    if problems:
        yield _from_problem("Horovod", Status.FAIL, problems[0])
        return
    built = [f"{fw} {version}".strip() for fw, version in evidence.horovod_built.items()]
    text = f"{evidence.version('horovod')}, built for {', '.join(built) or 'no framework'}"
    yield Line("Horovod", Status.OK, text)
    here = [fw for fw in _NAMES if evidence.has(fw)]
    usable = [fw for fw in here if fw in evidence.horovod_built]
    for framework in here:
        if framework in usable:
            yield _horovod_framework_line(evidence, framework)
        else:
            problem = versions.not_built_problem(
                evidence.installed.get("horovod"), tuple(evidence.horovod_built), framework
            )
            status = Status.WARN if usable else Status.FAIL
            yield _from_problem(f"horovod.{framework}", status, problem)


def _horovod_framework_line(evidence: Evidence, framework: str) -> Line:
    name = f"horovod.{framework}"
    finding = evidence.findings.get(name)
    fix = f"run `{versions.REINSTALL_HOROVOD}`"
    against, now = evidence.horovod_built[framework], evidence.version(framework)
    differs = bool(against) and against != now and against != _probed_version(evidence, framework)
    if finding is None or not finding.ok:
        found = _cannot(f"import {name}", finding)
        if differs:
            found += f"; it was built for {framework} {against}, and {now} is installed"
        return Line(name, Status.FAIL, found, fix)
    if differs:
        found = f"built for {framework} {against}, but {now} is installed: it may crash"
        return Line(name, Status.WARN, found, fix)
    built = [_TITLES.get(part, part.upper()) for part in finding.data["built"]]
    return Line(name, Status.OK, f"works with {', '.join(built)}")


def _mpi_lines(evidence: Evidence) -> Iterator[Line]:
    mpi4py, libmpi = evidence.findings.get("mpi4py"), evidence.libmpi
    loaded = [f for name, f in evidence.findings.items() if name.startswith("horovod.") and f.ok]
    if loaded:
        yield _horovod_mpi_line(loaded[0], libmpi)
    if mpi4py is None:
        found = "not installed; needed only for MPICollectives and the tests"
        yield Line("mpi4py", Status.INFO, found, "run `pip install mpi4py`")
    elif not mpi4py.ok:
        fix = "run `pip install --force-reinstall mpi4py`"
        if libmpi:
            fix += f", or set MPI4PY_LIBMPI={libmpi}"
        yield Line("mpi4py", Status.FAIL, _cannot("import mpi4py.MPI", mpi4py), fix)
    else:
        yield _mpi4py_line(mpi4py, libmpi)
    if isinstance(evidence.mpirun, Path):
        yield Line("mpirun", Status.OK, str(evidence.mpirun))
    elif evidence.mpirun:
        yield Line("mpirun", Status.WARN, "none that fits this Horovod", evidence.mpirun)


def _horovod_mpi_line(horovod: Finding, libmpi: str | None) -> Line:
    several = horovod.data["libmpi"]
    if len(several) > 1:
        fix = f"run `{versions.REINSTALL_HOROVOD}`, with only one MPI on LD_LIBRARY_PATH"
        return Line("MPI library", Status.FAIL, f"two in one process: {', '.join(several)}", fix)
    if libmpi is not None:
        return Line("MPI library", Status.OK, libmpi)
    found = "none: this Horovod was built without MPI and starts with `horovodrun --gloo` only"
    fix = f"for mpirun and srun: run `{versions.REINSTALL_HOROVOD}` where an mpicxx is on PATH"
    return Line("MPI library", Status.WARN, found, fix)


def _mpi4py_line(mpi4py: Finding, libmpi: str | None) -> Line:
    text = f"{mpi4py.data['version']}, {mpi4py.data['library'].split(', package')[0]}"
    own = mpi4py.data["libmpi"]
    if libmpi is None or not own:
        return Line("mpi4py", Status.OK, text)
    if own == [libmpi]:
        return Line("mpi4py", Status.OK, f"{text}, the same file as Horovod's")
    found = f"loads {', '.join(own)}, while Horovod loads {libmpi}"
    fix = (
        f"set MPI4PY_LIBMPI={libmpi}, or rebuild mpi4py with that MPI's mpicc first on PATH: "
        "`pip install --force-reinstall --no-binary=mpi4py mpi4py`"
    )
    return Line("mpi4py", Status.FAIL, found, fix)


# -- the launch -----------------------------------------------------------------------------------


def _launcher_line(evidence: Evidence) -> Line:
    launcher = evidence.launcher
    if launcher.launched:
        return Line("launcher", Status.OK, str(launcher))
    if launcher.allocation == "Slurm":
        found = f"{launcher}: nodes are reserved, nothing is launched yet"
        return Line("launcher", Status.INFO, found, "start the script with `srun` or `mpirun`")
    return Line("launcher", Status.INFO, f"{launcher}: this process was started by itself")


def _world_lines(evidence: Evidence) -> Iterator[Line]:
    """Does Horovod see the ranks the launcher started?"""
    world, launcher = evidence.findings.get("world"), evidence.launcher
    if world is None or world.outcome == "skipped":
        return
    name = "Horovod's ranks"
    if not world.ok and launcher.launched:
        yield Line(name, Status.FAIL, _cannot("start Horovod", world), _launch_fix(evidence))
    elif not world.ok:
        mpirun = evidence.mpirun if isinstance(evidence.mpirun, Path) else "mpirun"
        fix = f"start even a single process with a launcher: `{mpirun} -np 1 python ...`"
        if _is_open_mpi(evidence):
            fix += "; with Open MPI 4, OMPI_MCA_ess_singleton_isolated=1 does as well"
        yield Line(name, Status.WARN, f"without a launcher, {_cannot('start it', world)}", fix)
    elif launcher.size is not None and world.data["size"] != launcher.size:
        found = (
            f"{launcher.name} started {launcher.size} ranks ({launcher.evidence}), but Horovod "
            f"says size {world.data['size']}: each process would train by itself"
        )
        yield Line(name, Status.WARN, found, _launch_fix(evidence))
    else:
        over = "MPI" if world.data["mpi"] else "Gloo"
        yield Line(name, Status.OK, f"starts over {over}, size {world.data['size']}")


def _launch_fix(evidence: Evidence) -> str:
    mpirun = evidence.mpirun if isinstance(evidence.mpirun, Path) else None
    libmpi = Path(evidence.libmpi) if evidence.libmpi else None
    return rank_count.fix(evidence.launcher, evidence.environ, libmpi, mpirun)


def _idle_lines(evidence: Evidence) -> Iterator[Line]:
    """Open MPI's ranks poll while they wait, which takes the cores from those that compute."""
    launcher, machine = evidence.launcher, evidence.machine
    if not _is_open_mpi(evidence) or yields_when_idle(evidence.environ):
        return
    if launcher.launched:
        ranks, bound = launcher.local_size or 0, machine.usable_cores < machine.cores
        if _runs_over_mpi(evidence) and ranks and machine.crowded_by(ranks, bound=bound):
            found = f"{ranks} ranks and as many Horovod threads poll on {machine.cores} cores"
            yield Line("waiting ranks", Status.WARN, found, f"export {YIELD}")
    elif evidence.ranks and machine.crowded_by(evidence.ranks, bound=False):
        found = f"{evidence.ranks} ranks on {machine.usable_cores} cores: set for `--run`"
        yield Line("waiting ranks", Status.INFO, found, f"in your own launches: export {YIELD}")
    elif not evidence.ranks:
        found = f"{machine.usable_cores // 2 + 1} ranks or more here would poll on too few cores"
        yield Line("waiting ranks", Status.INFO, found, f"for those: export {YIELD}")


def _runs_over_mpi(evidence: Evidence) -> bool:
    world = evidence.findings.get("world")
    return world is not None and bool(world.data.get("mpi"))


def _is_open_mpi(evidence: Evidence) -> bool:
    return evidence.libmpi is not None and Path(evidence.libmpi).name.startswith("libmpi.so.40")


# -- words ----------------------------------------------------------------------------------------


def _from_problem(name: str, status: Status, problem: versions.Problem) -> Line:
    return Line(name, status, f"{problem.found}; needed: {problem.supported}", problem.fix)


def _cannot(what: str, finding: Finding | None) -> str:
    if finding is None or finding.outcome == "skipped":
        return f"cannot {what}: something before it failed"
    return f"cannot {what}: {finding.detail}"


def _probed_version(evidence: Evidence, part: str) -> str | None:
    finding = evidence.findings.get(part)
    return str(finding.data["version"]) if finding is not None and finding.ok else None
