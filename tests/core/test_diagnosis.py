"""What the doctor makes of what it sees, on machines it has never been on."""

import json
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from zerohvd.launchers import Launcher
from zerohvd.launching import LaunchResult
from zerohvd.tools.doctor import probes, run_check
from zerohvd.tools.doctor.diagnosis import Evidence, diagnose
from zerohvd.tools.doctor.machine import Machine
from zerohvd.tools.doctor.probes import Finding
from zerohvd.tools.doctor.rank_check import CHECKS, DTYPES, offered, rows
from zerohvd.tools.doctor.report import Line, Report, Status
from zerohvd.versions import Installed

OPEN_MPI = "/opt/openmpi/lib/libmpi.so.40"
BIG = Machine(cores=64, usable_cores=64, memory_bytes=2**38)
SMALL = Machine(cores=2, usable_cores=2, memory_bytes=2**34)
NO_LAUNCHER = Launcher("none")
SRUN = Launcher("srun", size=4, rank=0, local_size=4, allocation="Slurm", evidence="SLURM_NTASKS")
MPIRUN = Launcher("mpirun", "Open MPI", size=4, rank=0, local_size=4)


def ok(part, **data):
    return Finding(part, "ok", data)


HEALTHY = {
    "torch": ok("torch", version="2.13.0+cpu", kind="CPU", gpus=0),
    "tensorflow": ok("tensorflow", version="2.21.0", kind="CPU", gpus=0),
    "keras": ok("keras", version="3.15.1", backend="tensorflow"),
    "horovod.torch": ok("horovod.torch", built=["mpi", "nccl"], libmpi=[OPEN_MPI]),
    "horovod.tensorflow": ok("horovod.tensorflow", built=["mpi", "nccl"], libmpi=[OPEN_MPI]),
    "mpi4py": ok("mpi4py", version="4.1.2", library="Open MPI v4.1.8", libmpi=[OPEN_MPI]),
    "world": ok("world", size=1, rank=0, mpi=True),
}
VERSIONS = {"torch": "2.13.0+cpu", "tensorflow": "2.21.0", "keras": "3.15.1", "horovod": "0.28.1"}


def evidence(*, without=(), findings=None, machine=BIG, launcher=NO_LAUNCHER, **changes):
    """A healthy environment, with these changes."""
    gone = {*without, *(f"horovod.{name}" for name in without)}
    found = {part: f for part, f in {**HEALTHY, **(findings or {})}.items() if part not in gone}
    defaults = {
        "installed": {
            name: None if name in without else Installed(name, version, name, None)
            for name, version in VERSIONS.items()
        },
        "horovod_built": {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"},
        "mpirun": Path("/opt/openmpi/bin/mpirun"),
    }
    return Evidence(**{**defaults, **changes}, findings=found, machine=machine, launcher=launcher)


def lines_of(seen):
    return {line.name: line for line in diagnose(seen)}


def worst(lines):
    order = [Status.OK, Status.INFO, Status.WARN, Status.FAIL]
    return max((line.status for line in lines.values()), key=order.index)


# -- the environment ------------------------------------------------------------------------------


def test_a_healthy_environment_has_nothing_to_complain_about():
    lines = lines_of(evidence())
    assert worst(lines) is Status.INFO
    assert lines["horovod.torch"].found == "works with MPI, NCCL"
    assert "the same file as Horovod's" in lines["mpi4py"].found


def test_where_nothing_is_installed_every_line_says_what_to_do():
    seen = Evidence(launcher=NO_LAUNCHER, machine=BIG, mpirun="No mpirun: install an MPI.")
    lines = lines_of(seen)
    assert [lines[n].status for n in ("PyTorch", "TensorFlow", "Horovod")] == [Status.FAIL] * 3
    assert lines["Horovod"].fix == "run `zerohvd horovod install`"
    assert "pip install 'torch>=2.6'" in lines["PyTorch"].fix


@pytest.mark.parametrize(("gone", "line"), [("torch", "PyTorch"), ("tensorflow", "TensorFlow")])
def test_one_framework_is_enough(gone, line):
    lines = lines_of(evidence(without=(gone,)))
    assert lines[line].status is Status.INFO
    assert worst(lines) is Status.INFO


def test_a_horovod_built_for_one_of_two_frameworks_is_a_warning():
    lines = lines_of(evidence(horovod_built={"torch": ""}))
    assert lines["horovod.tensorflow"].status is Status.WARN
    assert "--force" in lines["horovod.tensorflow"].fix


def test_a_horovod_built_for_none_of_the_installed_frameworks_fails():
    lines = lines_of(evidence(without=("tensorflow",), horovod_built={"tensorflow": ""}))
    assert lines["horovod.torch"].status is Status.FAIL


def test_a_framework_that_changed_since_horovod_was_built_is_pointed_out():
    lines = lines_of(evidence(horovod_built={"torch": "2.9.0", "tensorflow": "2.21.0"}))
    line = lines["horovod.torch"]
    assert line.status is Status.WARN
    assert "built for torch 2.9.0, but 2.13.0+cpu is installed" in line.found
    assert "zerohvd horovod install --force" in line.fix


def test_a_crashing_horovod_fails_its_own_line_only():
    crash = Finding("horovod.torch", "crash", detail="the process was ended by SIGSEGV")
    lines = lines_of(evidence(findings={"horovod.torch": crash}))
    assert lines["horovod.torch"].status is Status.FAIL
    assert "SIGSEGV" in lines["horovod.torch"].found
    assert lines["PyTorch"].status is Status.OK


def test_another_keras_backend_matters_only_as_much_as_keras_does():
    with_torch = lines_of(evidence(keras_backend="jax"))["Keras"]
    alone = lines_of(evidence(keras_backend="jax", without=("torch",)))["Keras"]
    assert (with_torch.status, alone.status) == (Status.WARN, Status.FAIL)
    assert "KERAS_BACKEND=tensorflow" in alone.fix


def test_two_mpi_libraries_are_a_failure_that_names_both():
    other = ok("mpi4py", version="4", library="MPICH 4.2", libmpi=["/usr/lib/libmpich.so.12"])
    line = lines_of(evidence(findings={"mpi4py": other}))["mpi4py"]
    assert line.status is Status.FAIL
    assert OPEN_MPI in line.found and "/usr/lib/libmpich.so.12" in line.found
    assert f"MPI4PY_LIBMPI={OPEN_MPI}" in line.fix


def test_a_horovod_without_mpi_can_only_use_gloo():
    gloo = {f"horovod.{fw}": ok(fw, built=["gloo"], libmpi=[]) for fw in ("torch", "tensorflow")}
    line = lines_of(evidence(findings=gloo))["MPI library"]
    assert line.status is Status.WARN
    assert "horovodrun --gloo" in line.found


# -- the launch -----------------------------------------------------------------------------------


def test_ranks_that_are_each_alone_are_a_warning_with_the_way_out():
    lines = lines_of(evidence(launcher=SRUN))
    line = lines["Horovod's ranks"]
    assert line.status is Status.WARN
    assert "srun started 4 ranks (SLURM_NTASKS), but Horovod says size 1" in line.found
    assert "srun --mpi=pmix" in line.fix


def test_an_mpirun_of_another_mpi_is_answered_with_the_right_one():
    hydra = Launcher("mpirun", "MPICH", size=2, rank=0, evidence="PMI_SIZE")
    line = lines_of(evidence(launcher=hydra))["Horovod's ranks"]
    assert line.status is Status.WARN
    assert "/opt/openmpi/bin/mpirun" in line.fix


def test_ranks_that_horovod_sees_are_fine():
    world = {"world": ok("world", size=4, rank=0, mpi=True)}
    line = lines_of(evidence(launcher=SRUN, findings=world))["Horovod's ranks"]
    assert (line.status, line.found) == (Status.OK, "starts over MPI, size 4")


@pytest.mark.parametrize(("launcher", "status"), [(SRUN, Status.FAIL), (NO_LAUNCHER, Status.WARN)])
def test_a_horovod_that_cannot_start_fails_a_launch_but_not_a_login_node(launcher, status):
    crash = {"world": Finding("world", "crash", detail="the process ended with exit code 1")}
    line = lines_of(evidence(launcher=launcher, findings=crash))["Horovod's ranks"]
    assert line.status is status
    assert line.fix


def test_reserved_nodes_are_not_a_launch():
    line = lines_of(evidence(launcher=Launcher("none", allocation="Slurm")))["launcher"]
    assert line.status is Status.INFO
    assert "srun" in line.fix


# -- the machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "ranks", "bound", "crowded"),
    [
        (SMALL, 1, False, False),
        (SMALL, 2, False, True),
        (BIG, 32, False, False),
        (BIG, 33, False, True),
        (Machine(64, 1, None), 4, True, True),
        (Machine(64, 16, None), 4, True, False),
    ],
)
def test_a_machine_is_crowded_when_ranks_and_horovods_threads_outnumber_cores(
    machine, ranks, bound, crowded
):
    assert machine.crowded_by(ranks, bound=bound) is crowded


def test_crowded_ranks_are_told_to_yield_unless_they_do():
    world = {"world": ok("world", size=4, rank=0, mpi=True)}
    told = lines_of(evidence(launcher=MPIRUN, machine=SMALL, findings=world))["waiting ranks"]
    assert told.status is Status.WARN
    assert "OMPI_MCA_mpi_yield_when_idle=1" in told.fix
    yielding = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    seen = evidence(launcher=MPIRUN, machine=SMALL, findings=world, environ=yielding)
    assert "waiting ranks" not in lines_of(seen)


def test_ranks_over_gloo_do_not_poll():
    world = {"world": ok("world", size=4, rank=0, mpi=False)}
    seen = evidence(launcher=MPIRUN, machine=SMALL, findings=world)
    assert "waiting ranks" not in lines_of(seen)


# -- probes ---------------------------------------------------------------------------------------


def probed(tmp_path, code, timeout=20.0):
    """Findings for three parts of a process that knows where its record is."""
    record = tmp_path / "record.jsonl"
    parts = ["first", "second", "third"]
    lead = f"import os, signal, time; out = open({str(record)!r}, 'w', buffering=1)\n"
    command = [sys.executable, "-c", lead + code]
    return probes.run_recorded(command, parts, record, timeout)


FIRST_DONE = """
out.write('{"part": "first", "outcome": "begun"}\\n')
out.write('{"part": "first", "outcome": "ok", "data": {"version": "1"}}\\n')
out.write('{"part": "second", "outcome": "begun"}\\n')
"""


def test_a_crash_belongs_to_the_part_that_was_under_way(tmp_path):
    findings = probed(tmp_path, FIRST_DONE + "os.kill(os.getpid(), signal.SIGSEGV)")
    assert [f.outcome for f in findings] == ["ok", "crash", "skipped"]
    assert signal.SIGSEGV.name in findings[1].detail


def test_a_sudden_exit_is_a_crash_with_what_was_said_about_it(tmp_path):
    said = "os.write(2, b'[node:17] *** An error occurred in MPI_Init\\n--- bye ---\\n')"
    findings = probed(tmp_path, f"{FIRST_DONE}\n{said}\nos._exit(3)")
    assert findings[1].outcome == "crash"
    assert findings[1].detail.endswith("exit code 3: An error occurred in MPI_Init")


def test_a_part_that_hangs_is_given_up(tmp_path):
    findings = probed(tmp_path, FIRST_DONE + "time.sleep(60)", timeout=1.0)
    assert [f.outcome for f in findings] == ["ok", "timeout", "skipped"]


def test_an_interpreter_that_never_comes_up_is_the_first_parts_crash(tmp_path):
    findings = probed(tmp_path, "raise SystemExit('no numpy')")
    assert [f.outcome for f in findings] == ["crash", "skipped", "skipped"]


# -- the run --------------------------------------------------------------------------------------


def record_of(**special):
    """A rank's record; `special` maps "check/dtype" to another entry."""
    entries = [{"size": 2, "device": "cpu", "nccl": False}]
    wanted = [(c, d) for c in [*CHECKS, "process set"] for d in DTYPES if offered("torch", c, d)]
    for check, dtype in [*wanted, ("barrier", "float32")]:
        entry = special.get(f"{check}/{dtype}", {"outcome": "ok"})
        if entry is not None:
            entries.append({"check": check, "dtype": dtype, **entry})
    return entries


def ended(returncode=0, timed_out=False):
    return LaunchResult(("mpirun",), returncode, "", "the last words", timed_out, 3.0)


def cell(grid, check, dtype):
    return next(c for c in grid.cells if (c.check, c.dtype) == (check, dtype))


def test_a_run_in_which_all_ranks_agree_is_one_good_line():
    (line,), grid = vars(run_check.judge("torch", [record_of(), record_of()], ended())).values()
    assert line.status is Status.OK
    assert "2 ranks on cpu" in line.found
    assert {c.outcome for c in grid.cells} == {"ok", "-"}


def test_one_rank_with_a_wrong_number_fails_the_check_and_is_named():
    wrong = {"outcome": "FAIL", "detail": "AssertionError: expected [1.0], got [2.0]"}
    bad = record_of(**{"allreduce/float16": wrong, "allreduce/bfloat16": wrong})
    result = run_check.judge("torch", [record_of(), bad], ended(1))
    (line,) = result.lines
    assert line.name == "run torch: allreduce"
    assert "float16, bfloat16: rank 1: AssertionError" in line.found
    assert line.fix
    assert cell(result.grid, "allreduce", "float16").outcome == "FAIL"
    assert cell(result.grid, "allreduce", "float32").outcome == "ok"


def test_a_hanging_collective_is_named_and_those_after_it_were_not_run():
    stuck = record_of(**{"alltoall/int64": {"outcome": "begun"}})
    at = next(i for i, e in enumerate(stuck) if e.get("outcome") == "begun")
    result = run_check.judge("torch", [stuck[: at + 1]] * 2, ended(-9, timed_out=True))
    assert cell(result.grid, "alltoall", "int64").outcome == "FAIL"
    assert cell(result.grid, "barrier", "float32").outcome == "not run"
    assert "did not come back" in result.lines[0].found
    assert all(line.status is Status.FAIL for line in result.lines)


def test_ranks_that_are_each_alone_are_said_to_be():
    alone = [{"size": 1, "device": "cpu", "nccl": False}]
    (line,) = run_check.judge("torch", [alone, alone], ended(1)).lines
    assert line.status is Status.FAIL
    assert "Horovod says size 1" in line.found


def test_ranks_that_never_came_up_show_their_last_words():
    (line,) = run_check.judge("torch", [[], []], ended(1)).lines
    assert line.status is Status.FAIL
    assert "2 of 2 ranks never came up" in line.found
    assert "the last words" in line.found


def test_good_results_of_ranks_that_crashed_at_the_end_still_fail():
    (line,) = run_check.judge("torch", [record_of(), record_of()], ended(139)).lines
    assert line.status is Status.FAIL


@pytest.mark.parametrize("size", [1, 2, 36, 37, 64, 255])
def test_the_numbers_that_are_summed_are_exact_in_eight_bits(size):
    inputs = [rows(rank, 3, size) for rank in range(size)]
    assert sum(inputs).max() <= 255
    assert size == 1 or any((inputs[0] != other).any() for other in inputs[1:])


# -- the report -----------------------------------------------------------------------------------


def test_only_failures_change_the_exit_code():
    warned = Report((Line("a", Status.WARN, "hm"), Line("b", Status.INFO, "so")))
    failed = Report((Line("a", Status.OK, "fine"), Line("b", Status.FAIL, "bad", "mend it")))
    assert (warned.exit_code, failed.exit_code) == (0, 1)


def test_a_failing_line_without_a_fix_cannot_be_written():
    with pytest.raises(ValueError, match="how to fix it"):
        Line("thing", Status.FAIL, "broken")


def test_the_report_is_the_same_for_people_and_for_machines(capsys):
    report = Report((Line("thing", Status.FAIL, "[broken]", "mend it"),))
    document = json.loads(report.to_json(launcher="none"))
    assert document["ok"] is False
    assert document["launcher"] == "none"
    assert document["lines"] == [
        {"name": "thing", "status": "fail", "found": "[broken]", "fix": "mend it"}
    ]
    report.print(Console(width=80))
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("fail", "thing", "[broken]", "mend it"))


# -- GPUs ------------------------------------------------------------------------------------------

CUDA_TORCH = {"version": "2.13.0+cu130", "kind": "CUDA", "cuda": "13.0", "nccl": "2.29.7"}


def test_cpu_builds_have_no_lines_about_gpus():
    assert not [name for name in lines_of(evidence()) if "CUDA" in name or "NCCL" in name]


def test_a_cuda_build_says_its_versions_and_the_nccl_that_is_loaded():
    findings = {
        "torch": ok("torch", **CUDA_TORCH, gpus=4),
        "horovod.torch": ok(
            "horovod.torch", built=["mpi", "nccl", "cuda"], libmpi=[], libnccl=["/e/libnccl.so.2"]
        ),
    }
    lines = lines_of(evidence(findings=findings))
    assert lines["CUDA of torch"].found == "13.0, NCCL 2.29.7"
    assert lines["NCCL of horovod.torch"].found.startswith("/e/libnccl.so.2")
    assert "NVIDIA driver" not in lines


def test_a_missing_driver_is_one_line():
    torch = ok("torch", **CUDA_TORCH, gpus=0, driver="Found no NVIDIA driver on your system")
    line = lines_of(evidence(findings={"torch": torch}))["NVIDIA driver"]
    assert line.found == "torch finds no GPU: Found no NVIDIA driver on your system"
    assert "\n" not in line.found


def test_a_horovod_without_nccl_beside_a_cuda_torch_is_a_warning():
    findings = {
        "torch": ok("torch", **CUDA_TORCH, gpus=1),
        "horovod.torch": ok("horovod.torch", built=["mpi", "gloo"], libmpi=[], libnccl=[]),
    }
    line = lines_of(evidence(findings=findings))["NCCL of horovod.torch"]
    assert line.status is Status.WARN and "horovod install" in line.fix
