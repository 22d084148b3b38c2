"""`zerohvd horovod install`: look at what is installed, build what is missing, prove it."""

from __future__ import annotations

import importlib
import re
import sys
from functools import partial

from rich.console import Console

from zerohvd import versions
from zerohvd.launching import LaunchError, LaunchResult, launch
from zerohvd.tools.builder.build import BUILD_STEPS, RECORD, build_wheel, pip
from zerohvd.tools.builder.cache import Cache
from zerohvd.tools.builder.environment import Framework
from zerohvd.tools.builder.errors import BuilderError
from zerohvd.tools.builder.mpi import choose_mpi
from zerohvd.tools.builder.plan import RUNTIME_REQUIREMENTS, Plan, with_mpi
from zerohvd.tools.builder.steps import Steps

_PROOF_SECONDS = 180.0


def install(
    plan: Plan,
    *,
    console: Console | None = None,
    cache: Cache | None = None,
    dry_run: bool = False,
    force: bool = False,
    verify: bool = True,
) -> None:
    """Make the Horovod of `plan` the installed one.

    Args:
        plan: From `make_plan()`.
        console: Where the plan and the progress are shown.
        cache: Where wheels are kept; default: the user's cache folder.
        dry_run: Show the plan and what would be done, and change nothing.
        force: Build again even if there is a wheel, and install over what is there.
        verify: Run the proof on two ranks.

    Raises:
        BuilderError: Nothing half-done is left that a second call could not continue from.
    """
    console = console or Console(highlight=False)
    cache = cache or Cache.of_user()
    console.print(plan.table())
    if dry_run:
        console.print(f"\n{_intention(plan, cache, force)} Nothing was changed (--dry-run).")
        return
    if not force and _fits(plan, cache, console, verify):
        return
    cached = cache.wheel(plan.key) is not None and not force
    total = bool(plan.mpi.missing) + 1 + (0 if cached else BUILD_STEPS) + 1 + verify
    steps = Steps(total + (len(plan.frameworks) - 1) * verify, console)
    plan = _install_mpi(plan, cache, steps)
    _pip_step(plan, cache, steps, "What Horovod needs at run time", "runtime", RUNTIME_REQUIREMENTS)
    wheel = build_wheel(plan, cache, steps, force=force)
    arguments = ("--no-deps", "--no-cache-dir", "--force-reinstall", str(wheel))
    _pip_step(plan, cache, steps, f"Installing {wheel.name}", "install", arguments)
    importlib.invalidate_caches()
    if verify:
        for framework in plan.frameworks:
            steps.call(_proof_title(framework), partial(_prove, framework))
        cache.set_proved(plan.key)
    console.print(f"Horovod {plan.horovod} is installed. The wheel is kept in {wheel.parent}")


def _intention(plan: Plan, cache: Cache, force: bool) -> str:
    installed = versions.find("horovod")
    if not force and installed_key() == plan.key:
        return "This very build is installed already: nothing to do."
    before = ""
    if installed is not None:
        before = f"Installed now: Horovod {installed.version}, {_built_for(plan)}. "
    if not force and installed is not None and _same_frameworks(plan):
        return f"{before}Would try it on two ranks and keep it if it works, else build another."
    if not force and cache.wheel(plan.key):
        return f"{before}Would install the wheel that is in the cache ({plan.key})."
    return f"{before}Would build a wheel and keep it in {cache.root / 'wheels' / plan.key}."


def _built_for(plan: Plan) -> str:
    against = versions.horovod_built_against()
    text = ", ".join(f"{module} {version}" for module, version in against.items())
    return f"built for {text or 'unknown frameworks'}"


def _fits(plan: Plan, cache: Cache, console: Console, verify: bool) -> bool:
    """Whether the installed Horovod may stay; shows why (not)."""
    installed = versions.find("horovod")
    if installed is None:
        return False
    ours = installed_key() == plan.key
    if not ours and not _same_frameworks(plan):
        console.print(f"Horovod {installed.version} is installed, but {_built_for(plan)}.")
        return False
    if ours and (not verify or cache.is_proved(plan.key)):
        console.print(f"Horovod {installed.version} is installed and fits: nothing to do.")
        return True
    # Somebody's own build, perhaps with more than ours has (a cluster's NCCL): if it works, it
    # stays. --force replaces it.
    console.print(f"Horovod {installed.version} is installed, {_built_for(plan)}; trying it.")
    steps = Steps(len(plan.frameworks), console)
    for framework in plan.frameworks:
        try:
            steps.call(_proof_title(framework), partial(_prove, framework))
        except BuilderError as error:
            console.print(f"It does not work here and will be replaced. {error}", markup=False)
            return False
    if ours:
        cache.set_proved(plan.key)
    console.print("It works: nothing to do.")
    return True


def installed_key() -> str | None:
    """The key of the plan that the installed Horovod was built by; None for other builds."""
    installed = versions.find("horovod")
    if installed is None or installed.folder is None:
        return None
    record = installed.folder / RECORD
    found = re.search(r"^KEY = '(.+)'$", record.read_text(), re.M) if record.exists() else None
    return found.group(1) if found else None


def _same_frameworks(plan: Plan) -> bool:
    against = versions.horovod_built_against()
    return all(against.get(f.module) == f.version for f in plan.frameworks)


def _install_mpi(plan: Plan, cache: Cache, steps: Steps) -> Plan:
    if plan.mpi.missing is None:
        return plan
    _pip_step(plan, cache, steps, f"MPI from PyPI ({plan.mpi.missing})", "mpi", [plan.mpi.missing])
    importlib.invalidate_caches()
    return with_mpi(plan, choose_mpi(plan.compiler, "pypi"))


def _pip_step(
    plan: Plan,
    cache: Cache,
    steps: Steps,
    title: str,
    name: str,
    arguments: tuple[str, ...] | list[str],
) -> None:
    steps.run(
        title,
        pip("install", *arguments),
        log=cache.log(plan.key, name),
        hint=f"Is {sys.prefix} yours to write to, and the package index reachable?",
    )


def _proof_title(framework: Framework) -> str:
    return f"Proof: allreduce over 2 ranks with {framework.module}"


def _prove(framework: Framework) -> None:
    """An allreduce over two ranks.

    Raises:
        BuilderError: It failed or hung.
    """
    command = [sys.executable, "-m", "zerohvd.tools.builder.proof", framework.module]
    try:
        result = launch(2, command, timeout=_PROOF_SECONDS)
    except LaunchError as error:
        raise BuilderError(f"Horovod is installed, but cannot be tried: {error}") from error
    if not result.ok or result.stdout.count("proved") != 2:
        raise BuilderError(_proof_failure(framework.module, result))


def _proof_failure(framework: str, result: LaunchResult) -> str:
    return (
        f"Horovod is installed, but an allreduce over two ranks with {framework} fails.\n"
        f"{result.explain()}\n"
        "`zerohvd doctor --run 2` looks closer, `--force` builds it anew, and `--no-verify` leaves "
        "this check out, for example on a login node where MPI programs may not run."
    )
