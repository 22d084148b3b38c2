"""The launcher is told from the environment, innermost first."""

import pytest

from zerohvd.launchers import (
    FUSION_BYTES,
    Launcher,
    allow_single_process,
    detect,
    spare_fusion_buffers,
)

SLURM_JOB = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}
SRUN = {
    **SLURM_JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}
HOROVODRUN_GLOO = {
    "HOROVOD_SIZE": "3",
    "HOROVOD_RANK": "2",
    "HOROVOD_LOCAL_SIZE": "3",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
}
HOROVODRUN_MPI = {
    **OPEN_MPI,
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^openib",
    "OMPI_MCA_orte_tag_output": "1",
}
JSRUN = {
    "LSB_JOBID": "9",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
}


def facts(launcher: Launcher) -> tuple:
    return launcher.name, launcher.rank, launcher.size, launcher.local_size, launcher.allocation


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (HOROVODRUN_GLOO, ("horovodrun", 2, 3, 3, None)),
        (HOROVODRUN_MPI, ("horovodrun", 3, 4, 2, None)),
        (OPEN_MPI, ("mpirun", 3, 4, 2, None)),
        (HYDRA, ("mpirun", 1, 4, 2, None)),
        (SRUN, ("srun", 5, 8, 4, "Slurm")),
        (JSRUN, ("jsrun", 7, 12, 6, "LSF")),
        ({}, ("none", None, None, None, None)),
    ],
)
def test_each_launcher_is_recognised(environ, expected):
    assert facts(detect(environ)) == expected


def test_the_two_flavours_of_horovodrun_are_told_apart():
    assert detect(HOROVODRUN_GLOO).flavour == "Gloo"
    assert detect(HOROVODRUN_MPI).flavour == "MPI"


def test_the_flavours_of_mpirun_are_told_apart():
    assert detect(OPEN_MPI).flavour == "Open MPI"
    assert "MPICH" in detect(HYDRA).flavour
    assert detect({**HYDRA, "I_MPI_MPIRUN": "mpirun"}).flavour == "Intel MPI"


def test_a_batch_script_is_not_a_rank_although_slurm_tells_it_how_many_tasks_there_are():
    found = detect({**SLURM_JOB, "SLURM_PROCID": "0"})
    assert not found.launched
    assert facts(found) == ("none", None, None, None, "Slurm")


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "4294967292"])
def test_slurms_own_steps_such_as_an_interactive_shell_launch_nothing(step):
    assert not detect({**SRUN, "SLURM_STEP_ID": step}).launched


def test_a_step_smaller_than_its_job_counts_its_own_tasks():
    found = detect({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    assert (found.size, found.evidence) == (1, "SLURM_STEP_NUM_TASKS")


def test_without_the_steps_own_count_the_jobs_is_taken():
    environ = {k: v for k, v in SRUN.items() if k != "SLURM_STEP_NUM_TASKS"}
    assert (detect(environ).size, detect(environ).evidence) == (8, "SLURM_NTASKS")


@pytest.mark.parametrize(
    ("tasks", "node", "here"),
    [("4(x2)", "1", 4), ("2(x3),1", "3", 1), ("3,2,1", "1", 2), ("8", "1", None), ("x", "0", None)],
)
def test_slurms_list_of_tasks_per_node_is_read(tasks, node, here):
    environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert detect(environ).local_size == here


def test_mpirun_inside_a_slurm_job_is_mpirun_even_where_srun_started_its_daemons():
    assert facts(detect({**SRUN, **OPEN_MPI})) == ("mpirun", 3, 4, 2, "Slurm")
    assert facts(detect({**SRUN, **HYDRA})) == ("mpirun", 1, 4, 2, "Slurm")


def test_srun_with_pmi2_is_srun_although_it_sets_the_variables_of_hydra():
    found = detect({**SRUN, "PMI_SIZE": "8", "PMI_RANK": "5"})
    assert (found.name, found.size) == ("srun", 8)


def test_jsrun_is_jsrun_although_its_mpi_sets_the_variables_of_open_mpi():
    assert detect({**OPEN_MPI, **JSRUN}).name == "jsrun"


@pytest.mark.parametrize(
    ("environ", "system"),
    [
        ({"PBS_JOBID": "3.head", "PBS_NODEFILE": "/var/spool/nodes"}, "PBS"),
        ({"PBS_NODEFILE": "/var/spool/nodes"}, "PBS"),
        ({"LSB_JOBID": "4", "LSB_DJOB_NUMPROC": "8"}, "LSF"),
    ],
)
def test_an_allocation_alone_launches_nothing(environ, system):
    assert facts(detect(environ)) == ("none", None, None, None, system)
    assert system in str(detect(environ))


def test_a_leftover_size_without_a_place_to_meet_is_not_horovodrun():
    assert not detect({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}).launched


@pytest.mark.parametrize("text", ["", "many", "-1"])
def test_unreadable_numbers_are_no_launch(text):
    assert not detect({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": text}).launched


def test_one_rank_speaks_for_all():
    speaking = [detect({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(r)}).is_first for r in range(4)]
    assert speaking == [True, False, False, False]
    assert detect({}).is_first


def test_the_text_says_who_where_and_how_many():
    assert str(detect(OPEN_MPI)) == "mpirun (Open MPI), rank 3 of 4"
    assert str(detect(SRUN)) == "srun, rank 5 of 8, inside a Slurm job"


def test_a_process_without_a_launcher_may_stay_alone():
    alone: dict[str, str] = {}
    allow_single_process(alone)
    assert alone == {"OMPI_MCA_ess_singleton_isolated": "1"}
    of_another_mpi = dict(HYDRA)
    allow_single_process(of_another_mpi)
    assert of_another_mpi == {**HYDRA, "OMPI_MCA_ess_singleton_isolated": "1"}
    launched = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    allow_single_process(launched)
    assert "OMPI_MCA_ess_singleton_isolated" not in launched


def test_fusion_buffers_are_small_unless_the_user_has_a_say():
    silent: dict[str, str] = {}
    spare_fusion_buffers(silent)
    assert silent == {"HOROVOD_FUSION_THRESHOLD": str(FUSION_BYTES)}
    for said in ({"HOROVOD_FUSION_THRESHOLD": "1"}, {"HOROVOD_AUTOTUNE": "1"}):
        environ = dict(said)
        spare_fusion_buffers(environ)
        assert environ == said
