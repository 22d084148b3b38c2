"""One device per rank, as the ranks say it."""

from __future__ import annotations

import pytest

from zerohvd.devices import check_devices
from zerohvd.errors import DisagreementError

HOSTS = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    "devices",
    [
        [None] * 4,
        ["GPU-1", "GPU-2", "GPU-3", "GPU-4"],
        ["0", "1", "0", "1"],
        ["0", "", "", ""],  # only the first has its parameters yet
    ],
)
def test_ranks_with_a_device_each_or_none_are_fine(devices):
    check_devices(HOSTS, devices, fix="")


def test_two_ranks_on_one_device_are_named_with_what_to_write():
    with pytest.raises(DisagreementError, match=r"ranks 2 and 3 .* host b \(0\)") as raised:
        check_devices(HOSTS, ["0", "1", "0", "0"], fix="torch.cuda.set_device(hvd.local_rank())")
    assert "torch.cuda.set_device(hvd.local_rank())" in str(raised.value)


def test_a_rank_on_the_cpu_among_ranks_on_gpus_is_named():
    with pytest.raises(DisagreementError, match=r"ranks \[1\] train on the CPU"):
        check_devices(HOSTS, ["0", None, "0", "1"], fix="")
