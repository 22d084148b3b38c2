"""Jobs that lose ranks, and go on from memory: `zerohvd run`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import saying

from zerohvd.launching import launch, launch_environment, mpirun_command, run_to_the_end

JOB = Path(__file__).with_name("elastic_job.py")
SAMPLES, EPOCHS = 46, 3


def supervised(options: list[str], command: list[str], **env: str):
    run = [sys.executable, "-m", "zerohvd", "run", *options, "--", *command]
    return run_to_the_end(run, timeout=200, env={**launch_environment(), **env})


def job(folder: Path, stage: int, kills: list[list[int | str]]) -> list[str]:
    folder.mkdir(exist_ok=True)
    return [sys.executable, str(JOB), str(folder), str(stage), json.dumps(kills)]


class Said:
    """What the ranks of a job said.

    Attributes:
        begins: Start of the job -> (ranks, step) where its training begins.
        steps: (step, rank) -> (epoch, samples, loss), of the last time that it was made.
        end: What each rank said at the end.
        memory: Where the job's copies were.
    """

    def __init__(self, folder: Path) -> None:
        self.begins, self.steps, self.end, made_in = {}, {}, [], {}
        for rank, file in enumerate(sorted(folder.glob("said by *"))):
            for what, restart, *words in map(json.loads, file.read_text().splitlines()):
                if what == "begins":
                    self.begins[restart] = tuple(words)
                elif what == "step":
                    step, *rest = words
                    made_in.setdefault(step, restart)
                    if restart > made_in[step]:  # made again: what was made before counts no more
                        self.steps = {k: v for k, v in self.steps.items() if k[0] != step}
                        made_in[step] = restart
                    if restart == made_in[step]:
                        self.steps[step, rank] = tuple(rest)
                elif what == "memory":
                    self.memory = words[0]
                elif what == "end":
                    self.end.append((restart, words))

    def samples(self, epoch: int) -> list[int]:
        return sorted(i for e, used, _ in self.steps.values() if e == epoch for i in used)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Said:
    """Of stage 2; with two ranks all stages train alike, to the last bit."""
    folder = tmp_path_factory.mktemp("elastic")
    result = launch(2, job(folder, 2, []), timeout=100)
    assert result.ok, result.explain()
    assert "commits keep nothing" in result.stderr  # nobody starts it again, and it says so
    return Said(folder)


@pytest.mark.parametrize(
    ("stage", "kills", "begins"),
    [
        (1, [[0, 13, 0]], {1: (2, 12)}),
        (3, [[0, 7, 1]], {1: (2, 4), 2: (2, 18)}),
    ],
)
def test_a_killed_rank_costs_the_steps_since_the_last_commit(
    stage, kills, begins, uninterrupted, tmp_path
):
    command = mpirun_command(2, job(tmp_path, stage, kills))
    # Ranks that fail behind their training, here in the second start, do not train again.
    result = supervised(["--restarts", "2"], command, FAIL_AT_END="1" if 2 in begins else "")
    assert result.ok, result.explain()
    said = Said(tmp_path)
    assert said.begins == {0: (2, 0), **begins}
    assert said.steps == uninterrupted.steps  # samples and losses, bit by bit
    last = max(begins)
    assert [end for restart, end in said.end if restart == last] == [
        end for _, end in uninterrupted.end
    ]
    assert result.stderr.count("starts it again") == last
    assert said.memory and not Path(said.memory).exists()  # it has been given back


@pytest.mark.parametrize("stage", [3])
def test_a_host_is_lost_and_fewer_ranks_go_on_as_from_a_checkpoint(stage, tmp_path):
    """Four ranks on two hosts become three, one of them on a new host; what host b had is gone."""
    ranks = tmp_path / "elastic"
    command = mpirun_command(4, job(ranks, stage, [[0, 5, 3]]))
    command[command.index("-np") + 1] = "$((4 - ZEROHVD_RESTART))"
    words = [w if "$" in w else f"'{w}'" for w in command]
    script = (
        '[ "$ZEROHVD_RESTART" = 0 ] && export HOSTS=a,b,a,b || export HOSTS=a,a,c\n'
        f"{' '.join(words)}\n"
        'code=$?; [ "$ZEROHVD_RESTART" = 0 ] && rm -r "$ZEROHVD_ELASTIC/b"; exit $code'
    )
    disk = tmp_path / "disk"
    result = supervised(["--restarts", "1"], ["sh", "-c", script], DISK=str(disk))
    assert result.ok, result.explain()
    said = Said(ranks)
    assert said.begins == {0: (4, 0), 1: (3, 4)}
    for epoch in range(EPOCHS):
        assert said.samples(epoch) == list(range(SAMPLES))  # each once, none lost

    again = tmp_path / "checkpoint"
    env = {"DISK": str(disk), "ZEROHVD_RESTART": "1"}
    result = launch(3, job(again, stage, []), timeout=100, env=env)
    assert result.ok, result.explain()
    expected = Said(again)
    assert expected.begins == {1: (3, 4)}
    assert {k: v for k, v in said.steps.items() if k[0] >= 4} == expected.steps
    assert [end for restart, end in said.end if restart == 1] == [end for _, end in expected.end]


def test_keras_goes_on_after_a_rank_was_killed(tmp_path):
    script = Path(__file__).with_name("elastic_keras_job.py")
    command = mpirun_command(2, [sys.executable, str(script), str(tmp_path), "3"])
    result = supervised(["--restarts", "1"], command)
    assert result.ok, result.explain()
    said = ["start 0: epoch 0", "start 1: epoch 2", "same: True"]
    assert saying.heard(tmp_path) == said * 2


def test_ranks_leave_and_join_under_horovods_elastic_launcher(tmp_path):
    """Three ranks on two hosts: that of one is killed; two go on; a new host brings a third."""
    ranks, disk, hosts = tmp_path / "elastic", tmp_path / "disk", tmp_path / "hosts"
    hosts.write_text("localhost:2\n127.0.0.1:1\n")
    discovery = tmp_path / "discover.sh"
    discovery.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discovery.chmod(0o755)
    horovodrun = [str(Path(sys.executable).parent / "horovodrun"), "-np", "3", "--min-np", "2"]
    horovodrun += ["--max-np", "3", "--host-discovery-script", str(discovery)]
    horovodrun += ["--network-interfaces", "lo", "--gloo"]
    result = supervised(
        ["--restarts", "0"],
        [*horovodrun, *job(ranks, 3, [[0, 5, "127.0.0.1"]])],
        DISK=str(disk),
        GROW=f"{hosts}={socket.gethostname()}:1",
    )
    assert result.ok, result.explain()
    said = Said(ranks)
    assert said.begins == {0: (3, 0), 1: (2, 4), 2: (3, 8)}
    for epoch in range(EPOCHS):
        assert said.samples(epoch) == list(range(SAMPLES))
    ends = [end for restart, end in said.end if restart == 2]
    assert len(ends) == 3 and ends[0] == ends[1] == ends[2]

    again = tmp_path / "checkpoint"
    env = {"DISK": str(disk), "ZEROHVD_RESTART": "1"}
    result = launch(2, job(again, 3, []), timeout=100, env=env)
    assert result.ok, result.explain()
    expected = Said(again).steps
    for step in range(4, 8):
        for rank in range(2):
            assert said.steps[step, rank] == expected[step, rank]


def test_a_job_is_started_again_as_often_as_asked(tmp_path):
    script = f"echo $ZEROHVD_RESTART >> {tmp_path}/starts; exit 7"
    result = supervised(["--restarts", "2"], ["sh", "-c", script])
    assert result.returncode == 7
    assert (tmp_path / "starts").read_text().split() == ["0", "1", "2"]
    assert "ended with exit code 7, after 2 restarts" in result.stderr
    left = supervised(["--restarts", "2"], ["sh", "-c", f"echo >> {tmp_path}/saved; exit 85"])
    assert left.returncode == 85  # it has saved, and the scheduler starts it again
    assert len((tmp_path / "saved").read_text()) == 1


def test_hosts_that_do_not_answer_are_left_out(tmp_path):
    for host in "abc":
        (tmp_path / host).touch()
    script = f"echo {{np}} {{hosts}} >> {tmp_path}/starts; rm {tmp_path}/b; exit 1"
    options = ["--restarts", "3", "--hosts", "a:2,b:3,c", "--min-np", "4"]
    options += ["--probe", f"test -e {tmp_path}/{{host}}"]
    result = supervised(options, ["sh", "-c", script])
    assert (tmp_path / "starts").read_text().splitlines() == ["6 a:2,b:3,c:1"]
    assert "does not answer: b" in result.stderr
    assert "3 ranks are left, of at least 4" in result.stderr
    assert result.returncode == 1
    wrong = supervised(["--hosts", "a:two"], ["true"])
    assert wrong.returncode == 2 and "hosts must look like a:4,b:4" in wrong.stderr


def test_memory_is_given_back_when_the_supervisor_is_killed(tmp_path):
    script = f'echo "$ZEROHVD_ELASTIC" > {tmp_path}/memory; exec sleep 30'
    process = subprocess.Popen(
        [sys.executable, "-m", "zerohvd", "run", "--", "sh", "-c", script],
        env={**os.environ, "ZEROHVD_ELASTIC_PATIENCE": "1"},
    )
    said = tmp_path / "memory"
    try:
        wait_for(lambda: said.exists() and said.read_text())
        memory = Path(said.read_text().strip())
        assert memory.is_dir()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not memory.exists())


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_warnings_of_schedulers_reach_the_job(tmp_path):
    script = f"trap 'echo warned > {tmp_path}/said; exit 0' USR1; touch {tmp_path}/ready; "
    script += "while :; do sleep 0.1; done"
    process = subprocess.Popen(
        [sys.executable, "-m", "zerohvd", "run", "--restarts", "5", "--", "sh", "-c", script]
    )
    wait_for((tmp_path / "ready").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 0
    assert (tmp_path / "said").read_text() == "warned\n"


def test_a_supervisor_that_is_asked_to_end_ends_its_job(tmp_path):
    script = f"echo $$ > {tmp_path}/pid; exec sleep 60"
    process = subprocess.Popen(
        [sys.executable, "-m", "zerohvd", "run", "--restarts", "5", "--", "sh", "-c", script]
    )
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
