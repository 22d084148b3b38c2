"""`zerohvd doctor` as a user runs it: alone, under launchers, in bare and broken environments."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from zerohvd import versions
from zerohvd.launching import LaunchError, find_mpirun, launch, launch_environment

ROOT = Path(__file__).parents[2]
COMMAND = ["-c", "import sys; from zerohvd.tools.cli import main; sys.exit(main())", "doctor"]
FRAMEWORKS = [fw for fw in versions.horovod_frameworks() if versions.find(fw)]

needs_horovod = pytest.mark.skipif(not FRAMEWORKS, reason="needs Horovod and a framework")


def has_mpirun():
    try:
        return bool(find_mpirun())
    except LaunchError:
        return False


needs_mpirun = pytest.mark.skipif(not has_mpirun(), reason="needs the mpirun of Horovod's MPI")


def doctor(*args, python=sys.executable, env=None, path=()):
    """Run the command on its own, in an environment without any launcher's variables."""
    clean = {
        name: value
        for name, value in launch_environment().items()
        if not name.startswith(("OMPI_COMM_", "PMI", "SLURM_", "HOROVOD_", "KERAS_"))
    }
    search = os.pathsep.join([*map(str, path), str(ROOT)])
    return subprocess.run(
        [str(python), *COMMAND, *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**clean, "PYTHONPATH": search, **(env or {})},
    )


def document_of(done):
    return json.loads(done.stdout)


def lines_of(done):
    return {line["name"]: line for line in document_of(done)["lines"]}


def fake_package(site, name, version, code):
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(code)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python that has what zerohvd itself requires, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ("numpy", "packaging", "rich", "markdown_it", "mdurl", "pygments", "safetensors"):
        package = Path(importlib.util.find_spec(name).origin).parent
        (site / name).symlink_to(package)
        bundled = package.with_name(f"{name}.libs")
        if bundled.exists():
            (site / bundled.name).symlink_to(bundled)
    return folder / "bin" / "python"


def test_where_nothing_is_installed_it_says_what_to_install(bare):
    done = doctor("--json", python=bare)
    assert done.returncode == 1, done.stderr
    lines = lines_of(done)
    assert lines["Horovod"]["fix"] == "run `zerohvd horovod install`"
    assert all(line["fix"] for line in lines.values() if line["status"] == "fail")


def test_the_table_of_a_bare_environment_names_the_commands(bare):
    done = doctor(python=bare)
    assert done.returncode == 1
    assert "zerohvd horovod install" in done.stdout
    assert "pip install 'torch>=2.6'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_run_without_a_framework_fails_with_a_reason(bare):
    assert "no framework" in lines_of(doctor("--json", "--run", "2", python=bare))["run"]["found"]


def test_a_crashing_import_is_a_failing_line_and_not_a_dead_doctor(bare, tmp_path):
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    fake_package(tmp_path, "torch", "2.6.0", crash)
    done = doctor("--json", python=bare, path=[tmp_path])
    assert done.returncode == 1, done.stderr
    line = lines_of(done)["PyTorch"]
    assert (line["status"], "SIGSEGV" in line["found"]) == ("fail", True)


def test_a_missing_shared_library_is_a_failing_line_that_names_it(bare, tmp_path):
    error = "raise ImportError('libcudart.so.12: cannot open shared object file')"
    fake_package(tmp_path, "torch", "2.6.0", error)
    line = lines_of(doctor("--json", python=bare, path=[tmp_path]))["PyTorch"]
    assert (line["status"], "libcudart.so.12" in line["found"]) == ("fail", True)


def test_an_import_that_hangs_is_given_up_after_the_timeout(bare, tmp_path):
    fake_package(tmp_path, "torch", "2.6.0", "import time; time.sleep(600)")
    done = doctor("--json", "--timeout", "2", python=bare, path=[tmp_path])
    assert "no answer within 2 s" in lines_of(done)["PyTorch"]["found"]


@needs_horovod
def test_a_working_environment_passes_and_the_look_is_quick():
    start = time.monotonic()
    done = doctor("--json")
    assert time.monotonic() - start < 30  # 5 s on an idle machine; others may be at work
    assert done.returncode == 0, done.stdout
    document = document_of(done)
    assert document["ok"] is True
    assert document["launcher"]["name"] == "none"
    assert document["machine"]["cores"] >= 1
    assert {fw: lines_of(done)[f"horovod.{fw}"]["status"] for fw in FRAMEWORKS} == dict.fromkeys(
        FRAMEWORKS, "ok"
    )


@needs_horovod
def test_processes_that_slurm_counts_but_mpi_does_not_are_warned_about():
    task = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "4",
        "OMPI_MCA_ess_singleton_isolated": "1",  # a rank that MPI believes to be alone
    }
    done = doctor("--json", env={**task, "SLURM_PROCID": "0"})
    line = lines_of(done)["Horovod's ranks"]
    assert (done.returncode, line["status"]) == (0, "warn")
    assert "srun started 4 ranks" in line["found"] and "size 1" in line["found"]
    assert "--mpi=pmix" in line["fix"]
    assert doctor("--json", env={**task, "SLURM_PROCID": "1"}).stdout == ""


@needs_horovod
@needs_mpirun
def test_under_mpirun_one_rank_prints_what_all_ranks_found():
    result = launch(2, [sys.executable, *COMMAND, "--json"], timeout=120, cwd=ROOT)
    assert result.ok, result.explain()
    document = json.loads(result.stdout)  # one document, so one rank
    assert (document["launcher"]["name"], document["launcher"]["size"]) == ("mpirun", 2)
    (line,) = [line for line in document["lines"] if line["name"] == "Horovod's ranks"]
    assert (line["status"], line["found"]) == ("ok", "starts over MPI, size 2")


@needs_horovod
@needs_mpirun
def test_a_run_inside_a_launch_is_refused_with_the_command_to_use():
    argv = [sys.executable, *COMMAND, "--json", "--run", "2"]
    result = launch(2, argv, timeout=120, cwd=ROOT)
    assert result.returncode != 0
    document = json.loads(result.stdout)
    assert "without a launcher" in next(x for x in document["lines"] if x["name"] == "run")["fix"]


@needs_horovod
@needs_mpirun
def test_two_ranks_check_every_collective_with_every_dtype_of_every_framework():
    done = doctor("--json", "--run", "2")
    assert done.returncode == 0, done.stdout
    runs = {run["framework"].split()[0]: run for run in document_of(done)["runs"]}
    assert set(runs) == set(FRAMEWORKS)
    for run in runs.values():
        outcomes = {(cell["check"], cell["dtype"]): cell["outcome"] for cell in run["cells"]}
        assert set(outcomes.values()) == {"ok", "-"}
        assert outcomes["reducescatter uneven", "bfloat16"] == "ok"
        assert {check for check, _ in outcomes} >= {
            "allreduce",
            "allgather even",
            "allgather uneven",
            "reducescatter even",
            "broadcast",
            "alltoall",
            "process set",
            "barrier",
        }


@needs_horovod
@needs_mpirun
def test_a_collective_that_computes_wrong_is_found_and_named(tmp_path):
    """A Horovod whose averages, sums and maxima are one too large."""
    (tmp_path / "sitecustomize.py").write_text(
        "import zerohvd.communication.collectives as c\n"
        "right = c.HorovodCollectives.allreduce\n"
        "def wrong(self, x, op='sum', *, name='allreduce'):\n"
        "    return right(self, x, op, name=name) + 1\n"
        "c.HorovodCollectives.allreduce = wrong\n"
    )
    done = doctor("--json", "--run", "2", path=[tmp_path])
    assert done.returncode == 1
    for framework in FRAMEWORKS:
        line = lines_of(done)[f"run {framework}: allreduce"]
        assert line["status"] == "fail"
        assert "float32" in line["found"] and "rank 1" in line["found"]
        assert "zerohvd horovod install --force" in line["fix"]
        assert f"run {framework}: broadcast" not in lines_of(done)
