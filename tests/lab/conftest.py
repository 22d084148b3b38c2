"""The lab: three hosts and a Slurm on them, made once. Where it cannot be, tests say why."""

from __future__ import annotations

from collections.abc import Iterator

import packages
import pytest
from hosts import Hosts
from slurm import Slurm

from zerohvd.launching import LaunchError, find_mpirun, horovod_libmpi


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    try:
        find_mpirun()
        libmpi = horovod_libmpi()
        if libmpi is None or not libmpi.name.startswith("libmpi.so.40"):
            pytest.skip(f"these tests start ranks with Open MPI, and Horovod's MPI is {libmpi}")
        lab = Hosts(3)
    except (packages.NotHereError, LaunchError) as error:
        pytest.skip(f"no hosts of their own for ranks: {error}")
    with lab:
        yield lab


@pytest.fixture(scope="session")
def slurm(hosts: Hosts) -> Slurm:
    try:
        return Slurm(hosts)
    except packages.NotHereError as error:
        pytest.skip(f"no Slurm: {error}")


@pytest.fixture(autouse=True)
def _free_links(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that has cut or slowed down links leaves them as they were."""
    yield
    if "hosts" in request.fixturenames:
        lab = request.getfixturevalue("hosts")
        for host in lab:
            host.mend()
