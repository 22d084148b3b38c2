"""A real Slurm on the lab's hosts: its controller on the first, a slurmd on each.

    slurm = Slurm(hosts)
    slurm.run(["srun", "-N2", "-n4", "--mpi=pmix", "python", "train.py"], timeout=60)

Slurm, munge and all that they write live in the hosts' own /run and in the lab's folder, and end
with the hosts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import packages
from hosts import Hosts

from zerohvd.launching import LaunchResult

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1
# More CPUs than there are: 4 tasks fit on a host
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={host.name} NodeAddr={host.address} CPUs={cpus} RealMemory=4000 State=UNKNOWN"
MUNGE = """\
mkdir -p /run/slurm/state /run/slurm/spool
/usr/sbin/munged --force --key-file={folder}/munge.key --socket=/run/munge/munge.socket.2 \
  --pid-file=/run/munge/pid --log-file=/run/munge/log --seed-file=/run/munge/seed
"""
# The PMIx of PyPI's Open MPI has no munge, which that of Slurm would choose.
ENVIRONMENT = {"PMIX_MCA_psec": "native"}


class Slurm:
    """The cluster of all hosts.

    Attributes:
        environment: What commands of Slurm need.
    """

    def __init__(self, hosts: Hosts, cpus: int = 4) -> None:
        packages.need(packages.OF_SLURM)
        self._first = hosts["h1"]
        self._folder = hosts.folder
        self.environment = {"SLURM_CONF": str(hosts.folder / "slurm.conf"), **ENVIRONMENT}
        nodes = [NODE.format(host=host, cpus=cpus) for host in hosts]
        Path(self.environment["SLURM_CONF"]).write_text(
            CONFIGURATION.format(first=self._first, folder=hosts.folder, nodes="\n".join(nodes))
        )
        # Hosts share /tmp, as real ones do not: the plug-ins would meet in one folder there.
        (hosts.folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/run/slurm\n")
        self._first_run(["/usr/sbin/mungekey", "-c", "-k", str(hosts.folder / "munge.key")])
        for host in hosts:
            script = MUNGE.format(folder=hosts.folder)
            if host is self._first:
                script += "/usr/sbin/slurmctld -c\n"
            started = host.run(
                ["bash", "-ec", f"{script}/usr/sbin/slurmd -N {host.name}"], env=self.environment
            )
            if not started.ok:
                raise packages.NotHereError(f"no Slurm: {started.explain()}")
        self._wait_for_nodes(len(nodes))

    def _first_run(self, argv: Sequence[str]) -> None:
        done = self._first.run(argv)
        if not done.ok:
            raise packages.NotHereError(f"no Slurm: {done.explain()}")

    def _wait_for_nodes(self, count: int) -> None:
        for _ in range(60):
            found = self.run(["sinfo", "-h", "-N", "-o", "%T"]).stdout.split()
            if found == ["idle"] * count:
                return
            time.sleep(0.5)
        log = (self._folder / "slurmctld.log").read_text()[-1000:]
        raise packages.NotHereError(f"Slurm's nodes are {found}: {log}")

    def run(
        self, argv: Sequence[str], *, timeout: float = 60, env: Mapping[str, str] | None = None
    ) -> LaunchResult:
        """Run a command of Slurm's (sbatch, srun, scontrol, ...) on the first host."""
        return self._first.run(argv, timeout=timeout, env={**self.environment, **(env or {})})

    def submit(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """`sbatch` of these words; the job's number."""
        done = self.run(["sbatch", *words], env=env)
        assert done.ok, done.explain()
        return re.search(r"job (\d+)", done.stdout)[1]

    def wait(self, job: str, timeout: float) -> str:
        """The state in which a job has ended, such as COMPLETED."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            shown = self.run(["scontrol", "show", "job", job]).stdout
            found = re.search(r"JobState=(\w+)", shown)
            if found and found[1] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return found[1]
            time.sleep(0.2)
        self.run(["scancel", job])
        raise AssertionError(f"job {job} has not ended within {timeout} s: {shown}")
