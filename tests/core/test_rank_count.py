"""Ranks that do not find each other: which one says what."""

import re
import sys
from pathlib import Path

import pytest

from zerohvd import rank_count
from zerohvd.launchers import detect
from zerohvd.rank_count import check_ranks, fix, warn_of_lonely_ranks

OPEN_MPI = Path("/opt/openmpi/lib/libmpi.so.40")
MPICH = Path("/opt/mpich/lib/libmpi.so.12")
MPIRUN = Path("/opt/openmpi/bin/mpirun")
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
}
BY_OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}


def advice(environ, libmpi=OPEN_MPI, mpirun=MPIRUN):
    return fix(detect(environ), environ, libmpi, mpirun)


def test_every_rank_says_which_it_is_and_what_to_write():
    with pytest.raises(RuntimeError, match="this is rank 2 of 4 that mpirun started") as told:
        check_ranks(BY_OPEN_MPI, size=1)
    assert "but Horovod sees one" in str(told.value)
    assert "ZEROHVD_ALONE=1" in str(told.value)


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        (BY_OPEN_MPI, 4),
        ({}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, 1),
        # A batch script, or a shell in an allocation: nothing has been launched there.
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1),
        ({**SRUN, "SLURM_STEP_ID": "4294967290"}, 1),
        # A step of one task in a job of eight.
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1),
        ({"PBS_JOBID": "3.head", "PBS_NODEFILE": "/nodes", "PBS_NP": "8"}, 1),
        ({"LSB_JOBID": "4", "LSB_DJOB_NUMPROC": "8"}, 1),
        # Eight trainings side by side, on purpose; an elastic job that has shrunk.
        ({**SRUN, "ZEROHVD_ALONE": "1"}, 1),
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "h", "HOROVOD_SIZE": "2", "HOROVOD_RANK": "0",
          "HOROVOD_ELASTIC": "1"}, 1),
    ],
)  # fmt: skip
def test_there_is_no_false_alarm(environ, size):
    check_ranks(environ, size)


def test_srun_is_told_which_mpi_to_speak():
    assert "srun --mpi=pmix python" in advice(SRUN)
    assert "--mpi=none" in advice(SRUN)
    assert "srun --mpi=pmix python" in advice({**SRUN, "PMI_RANK": "5"})
    assert "srun --mpi=pmi2 python" in advice(SRUN, MPICH)
    assert "PMIX_MCA_psec=native" in advice({**SRUN, "PMIX_RANK": "5"})
    assert f"{MPIRUN} -np 8" in advice(SRUN)


def test_the_wheel_of_open_mpi_needs_one_setting_more():
    assert "PMIX_MCA_psec=native srun" in advice(SRUN, Path(sys.prefix, "lib", "libmpi.so.40"))


def test_other_launchers_are_replaced_by_horovods_own():
    hydra = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}
    assert re.search(r"MPICH.* another MPI .*/opt/openmpi/bin/mpirun -np 2", advice(hydra))
    assert str(OPEN_MPI) in advice(hydra, mpirun=None)
    assert "horovodrun -np 2" in advice(hydra, libmpi=None)


def test_before_horovod_starts_a_rank_of_srun_without_mpi_says_so(capsys, monkeypatch):
    monkeypatch.setattr(rank_count.launching, "horovod_libmpi", lambda: OPEN_MPI)
    warn_of_lonely_ranks({**SRUN, "PMIX_RANK": "5"})
    warn_of_lonely_ranks({**SRUN, "SLURM_STEP_NUM_TASKS": "1"})
    warn_of_lonely_ranks({})
    assert capsys.readouterr().err == ""
    warn_of_lonely_ranks(SRUN)
    assert "rank 5 of 8 that srun started" in capsys.readouterr().err
