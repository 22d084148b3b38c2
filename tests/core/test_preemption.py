"""Signals, schedulers and the common decision to leave, without a framework."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zerohvd.communication.collectives import SingleProcess
from zerohvd.preemption import departure, schedulers, signals
from zerohvd.preemption.departure import ByAllreduce, Departure, Terms, Wish
from zerohvd.preemption.schedulers import SchedulerError, duration, scheduler_of
from zerohvd.testing import ThreadWorld

# -- schedulers ------------------------------------------------------------------------------------

QSTAT = """Job Id: 1234.pbs
    Job_Name = train
    resources_used.walltime = 00:10:30
    job_state = R
    Resource_List.select = 2:ncpus=8
    Resource_List.walltime = 01:00:00
"""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2-03:04:05", 183845), ("03:04:05", 11045), ("4:05", 245), ("245", 245), ("0:00", 0)],
)
def test_times_as_schedulers_write_them(text, seconds):
    assert duration(text) == seconds


def test_a_time_that_is_none_is_refused():
    with pytest.raises(SchedulerError, match="INVALID"):
        duration("INVALID")


def commands(answers: dict[str, str], told: list[str]):
    """Runs a command by its answer; those without one fail."""

    def tell(argv):
        told.append(" ".join(argv))
        for beginning, answer in answers.items():
            if told[-1].startswith(beginning):
                return answer
        raise SchedulerError("no such command")

    return tell


@pytest.mark.parametrize(
    ("environ", "answers", "left"),
    [
        ({"SLURM_JOB_ID": "7"}, {"squeue --noheader --jobs 7": "1:05:00\n"}, 3900),
        ({"SLURM_JOB_ID": "7"}, {"squeue": "UNLIMITED\n"}, None),
        ({"PBS_JOBID": "1234.pbs"}, {"qstat -f 1234.pbs": QSTAT}, 2970),
        ({"PBS_JOBID": "1234.pbs"}, {"qstat": "Job Id: 1234.pbs\n"}, None),
        ({"LSB_JOBID": "5"}, {"bjobs -noheader -o time_left 5": "1:30 L\n"}, 5340),
        (
            {"LSB_JOBID": "5", "LSB_JOBINDEX": "3"},
            {"bjobs -noheader -o time_left 5[3]": "0:02 L"},
            60,
        ),
        ({"LSB_JOBID": "5"}, {"bjobs": "-\n"}, None),
    ],
)
def test_schedulers_say_how_much_time_is_left(environ, answers, left):
    assert scheduler_of(environ, commands(answers, [])).seconds_left() == left


def test_pbs_knows_when_a_job_began_and_notes_only_now_and_then_what_was_used():
    said = f"{QSTAT} stime = {time.ctime(time.time() - 1000)}\n"
    left = scheduler_of({"PBS_JOBID": "1"}, commands({"qstat": said}, [])).seconds_left()
    assert left == pytest.approx(2600, abs=5)


def test_variables_say_it_where_commands_are_missing():
    end = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 100)}
    assert 95 < scheduler_of(end, commands({}, [])).seconds_left() <= 100
    torque = {"PBS_JOBID": "1", "PBS_WALLTIME": "864000"}
    assert 863000 < scheduler_of(torque, commands({}, [])).seconds_left() < 864000
    with pytest.raises(SchedulerError):
        scheduler_of({"SLURM_JOB_ID": "7"}, commands({}, [])).seconds_left()
    assert scheduler_of({}) is None


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "7"),
        # The last task of an array has the array's own number.
        ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3"),
        ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}, "5_1"),
    ],
)
def test_slurm_requeues_this_job_and_no_other_task_of_an_array(environ, name):
    told: list[str] = []
    answers = {"squeue": "RUNNING\n", "scontrol": ""}
    scheduler_of({"SLURM_JOB_ID": "7", **environ}, commands(answers, told)).requeue(in_time=True)
    assert told[-1] == f"scontrol requeue {name}"


def test_a_job_that_was_cancelled_stays_so():
    slurm = scheduler_of({"SLURM_JOB_ID": "7"}, commands({"squeue": "COMPLETING\n"}, []))
    with pytest.raises(SchedulerError, match="cancelled"):
        slurm.requeue(in_time=True)


def test_a_command_that_fails_says_why(tmp_path, monkeypatch):
    script = tmp_path / "squeue"
    script.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SchedulerError, match="Invalid job id"):
        schedulers.tell(["squeue"])
    with pytest.raises(SchedulerError, match="no such-command on PATH"):
        schedulers.tell(["such-command"])


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def listener():
    made = signals.listen()
    yield made
    made.stop()


def test_a_signal_sets_a_flag_and_nothing_else(listener):
    assert listener.asked == ""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert listener.asked == "SIGTERM"
    listener.forget()
    assert listener.asked == ""
    listener.stop()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_under_lsf_its_signal_at_the_run_limit_counts():
    lsf = signals.numbers_of(None, {"LSB_JOBID": "1"})
    assert lsf == [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2]
    assert signals.numbers_of(["usr2", 15, "SIGINT"], {}) == [12, 15, 2]
    for wrong in ("NONE", 999, "KILL"):
        with pytest.raises(ValueError, match=r"signals must|cannot be caught"):
            signals.numbers_of([wrong], {})


def child() -> int:
    """The number of a forked child that waits, as a worker does for its next batch."""
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    time.sleep(0.05)
    return pid


def ended(pid: int, within: float) -> int | None:
    until = time.monotonic() + within
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    return None


def test_forked_children_do_not_inherit_the_handler(listener):
    pid = child()
    os.kill(pid, signal.SIGUSR1)
    assert ended(pid, 0.2) is None  # the default would end it
    # A TERM to all processes of the job, children first.
    os.kill(pid, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended(pid, 0.5) is None
    assert listener.asked == "SIGTERM"
    # When the parent has answered, it can end its children.
    listener.forget()
    os.kill(pid, signal.SIGTERM)
    assert os.WTERMSIG(ended(pid, 5.0)) == signal.SIGTERM


def test_programs_that_are_started_get_plain_signals(listener):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM


def test_only_the_main_thread_can_listen():
    errors = []

    def run():
        try:
            signals.listen()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 16])
def test_one_rank_is_asked_and_all_know_after_the_same_step(size):
    found = ThreadWorld(size).run(lambda ranks: after_which_step(ranks, asked=size - 1, at=3))
    assert found == [3] * size


def after_which_step(ranks, asked, at):
    messenger = ByAllreduce(lambda: ranks)
    now = [0]
    messenger.begin(lambda: Wish.LEAVE if ranks.rank == asked and now[0] >= at else Wish.NONE)
    for now[0] in range(10):
        if messenger.after_step() == Wish.LEAVE:
            return now[0]
    return None


def one(monkeypatch, left, **terms):
    """One rank under a Slurm that answers `left`, and by a clock that only the test moves."""
    clock = [1000.0]
    monkeypatch.setattr(departure.time, "monotonic", lambda: clock[0])
    slurm = schedulers.Slurm("7", "", commands({}, []))
    monkeypatch.setattr(slurm, "seconds_left", lambda: left[0])
    monkeypatch.setattr(departure, "scheduler_of", lambda environ: slurm)
    world = SingleProcess()
    made = Departure(lambda: world, ByAllreduce(lambda: world), Terms(**terms), {})
    made.begin()
    return made, clock


def test_a_save_is_tried_once_the_end_is_known_and_starts_twice_its_time_before(monkeypatch):
    left = [1000.0]
    made, clock = one(monkeypatch, left)
    try:
        assert made.after_step() is Wish.SAVE
        made.measured(30.0)
        while made.after_step() is Wish.NONE:
            clock[0] += 2.0
            left[0] -= 2.0
        assert made.seconds_left >= 2 * 30.0 + 2.0
        assert made.seconds_left <= 2 * 30.0 + 2 * 2.0 + 12.0
    finally:
        made.end()


def test_a_job_that_got_more_time_goes_on(monkeypatch):
    left = [100.0]
    made, clock = one(monkeypatch, left)
    try:
        made.measured(1.0)
        clock[0] += 95.0
        left[0] = 5000.0
        assert made.after_step() is Wish.NONE
        assert made.seconds_left > 4000
    finally:
        made.end()


def test_without_an_end_no_save_is_tried(monkeypatch):
    made, _ = one(monkeypatch, [None])
    try:
        assert made.after_step() is Wish.NONE
    finally:
        made.end()


@pytest.mark.parametrize(
    "terms", [{"walltime": 0}, {"walltime": -1.0}, {"exit_code": 0}, {"exit_code": 300}]
)
def test_terms_that_make_no_sense_are_refused(terms):
    with pytest.raises(ValueError, match="must"):
        Terms(**terms)


def test_horovodruns_five_seconds_are_told(capfd):
    environ = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_SIZE": "1",
        "HOROVOD_RANK": "0",
    }
    world = SingleProcess()
    made = Departure(lambda: world, ByAllreduce(lambda: world), Terms(), environ)
    made.begin()
    made.end()
    assert "kills all ranks 5 s later" in capfd.readouterr().err


def test_rank_0_requeues_once(tmp_path, monkeypatch, capfd):
    told = tmp_path / "told"
    for name, body in (("squeue", "echo RUNNING"), ("scontrol", f'echo "$@" >> {told}')):
        script = Path(tmp_path, name)
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    world = SingleProcess()
    environ = {"SLURM_JOB_ID": "9"}
    made = Departure(lambda: world, ByAllreduce(lambda: world), Terms(walltime=500), environ)
    made.begin()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit) as leaving:
            made.leave("Saved step 4")
        assert leaving.value.code == 85
    signals.listen(()).stop()
    assert told.read_text() == "requeue 9\n"
    said = capfd.readouterr().err
    assert "asked to leave (SIGUSR1 on rank 0). Saved step 4. Exit code 85" in said
