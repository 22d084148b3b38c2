"""A rank's share of the cores."""

import pytest

from zerohvd.cores import YIELD, Cores, count_cores, look, parse_quota, settle

MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [
        (Cores(16, 16), 4, 4),  # nobody is bound
        (Cores(16, 4), 4, 4),  # bound to four cores each
        (Cores(16, 8), 4, 4),  # bound to a socket, two ranks on each
        (Cores(16, 1), 2, 1),  # bound to a core
        (Cores(6, 6), 4, 1),
        (Cores(2, 2), 8, 1),
        (Cores(64, 64, quota=8), 2, 4),  # a container's share of a large machine
        (Cores(64, 64, quota=1), 2, 1),
    ],
)
def test_each_rank_counts_on_its_share(cores, ranks, threads):
    assert cores.threads(ranks) == threads


def test_ranks_and_horovods_threads_outnumber_the_cores():
    assert Cores(4, 4).crowded_by(3)
    assert not Cores(4, 4).crowded_by(2)
    assert Cores(16, 1).crowded_by(2)
    assert Cores(16, 16, quota=4).crowded_by(3)


def settled(environ, now=8, cores=None, *, is_started=False):
    environ, calls = dict(environ), []
    cores = cores or Cores(8, 8)
    settle(now, calls.append, "the call", is_started=is_started, environ=environ, cores=cores)
    return calls, environ


def test_threads_are_set_and_announced_by_one_rank(capsys):
    assert settled(MPIRUN)[0] == [2]
    said = capsys.readouterr().err
    assert "4 ranks on 8 cores: 2 threads per rank (the call or OMP_NUM_THREADS" in said
    assert settled({**MPIRUN, "OMPI_COMM_WORLD_RANK": "3"})[0] == [2]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("environ", "now"),
    [
        ({**MPIRUN, "OMP_NUM_THREADS": "8"}, 8),
        ({**MPIRUN, "MKL_NUM_THREADS": "3"}, 8),
        (MPIRUN, None),
        (MPIRUN, 3),  # no framework chooses that by itself
        (MPIRUN, 2),  # as it should be
        ({}, 8),  # one process
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 8),
    ],
)
def test_what_a_user_has_set_stays(environ, now, capsys):
    assert settled(environ, now)[0] == []
    assert capsys.readouterr().err == ""


def test_threads_are_never_more_than_the_framework_took():
    """Torch takes one thread for the two of a core with hyperthreads."""
    few = {**MPIRUN, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert settled(few, 32, cores=Cores(64, 64))[0] == []
    assert settled(MPIRUN, 32, cores=Cores(64, 64))[0] == [16]


def test_crowded_ranks_give_their_core_away_while_they_wait(capsys):
    few = Cores(4, 4)
    assert settled(MPIRUN, cores=few)[1][YIELD] == "1"
    assert "gives its core away" in capsys.readouterr().err
    assert settled({**MPIRUN, YIELD: "0"}, cores=few)[1][YIELD] == "0"
    assert YIELD not in settled(MPIRUN)[1]


def test_once_mpi_runs_the_user_is_told_what_to_set(capsys):
    assert YIELD not in settled(MPIRUN, cores=Cores(4, 4), is_started=True)[1]
    assert f"export {YIELD}=1" in capsys.readouterr().err


def test_what_the_kernel_says_is_read():
    assert count_cores("0-3,8\n") == 5
    assert count_cores("") == 0
    assert parse_quota("250000 100000") == 2
    assert parse_quota("max 100000") is None
    found = look()
    assert 1 <= found.allowed <= found.here
