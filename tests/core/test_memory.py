"""What a rank holds, as it is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from zerohvd.memory import MemoryReport, format_bytes

REPORT = MemoryReport(params=4 << 20, grads=1 << 20, optimizer=3 << 30, master=0, buffers=1 << 19)


def test_a_report_is_a_mapping_with_exactly_these_keys():
    assert isinstance(REPORT, Mapping)
    assert list(REPORT) == ["params", "grads", "optimizer", "master", "buffers", "total"]
    assert REPORT["grads"] == REPORT.grads == 1 << 20
    assert REPORT["total"] == sum(REPORT[key] for key in REPORT if key != "total")
    assert dict(REPORT) == REPORT
    with pytest.raises(KeyError):
        REPORT["stage"]


def test_a_report_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.params = 0


def test_a_report_reads_as_a_table():
    assert str(REPORT).splitlines() == [
        "params         4.00 MiB",
        "grads          1.00 MiB",
        "optimizer  3,072.00 MiB",
        "master         0.00 MiB",
        "buffers        0.50 MiB",
        "total      3,077.50 MiB",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (8 << 20, "8.00 MiB"),
        (1610612736, "1.50 GiB"),
        (3 << 40, "3.00 TiB"),
        (5 << 50, "5,120.00 TiB"),
    ],
)
def test_bytes_as_people_read_them(count, text):
    assert format_bytes(count) == text
