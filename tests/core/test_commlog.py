"""What was moved, counted in bytes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerohvd.communication.log import CommLog, CommunicationReport, Record, Total

OPS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast")


@given(st.integers(1, 64), st.integers(0, 1000))
def test_an_allreduce_moves_what_a_reducescatter_and_an_allgather_do(size, elements):
    nbytes = 4 * elements * size  # as padded buckets are
    log, parts = CommLog(size), CommLog(size)
    log.add("g", "allreduce", "float32", elements * size, nbytes)
    parts.add("g", "reducescatter", "float32", elements * size, nbytes)
    parts.add("g", "allgather", "float32", elements * size, nbytes)
    assert log.moved == parts.moved == 2 * nbytes * (size - 1) // size


@pytest.mark.parametrize("op", OPS)
def test_a_single_rank_moves_nothing(op):
    log = CommLog(1)
    log.add("x", op, "float32", 10, 40)
    assert log.totals() == {op: Total(1, 0)}


def test_uneven_exchanges_say_themselves_what_they_moved():
    log = CommLog(4)
    log.add("x", "alltoall", "int8", 100, 100, moved=17)
    assert log.records[0] == Record("x", "alltoall", "int8", 100, 100, 17)
    assert log.moved == 17


def test_totals_never_forget_but_single_records_do(monkeypatch):
    monkeypatch.setattr("zerohvd.communication.log.KEPT_RECORDS", 3)
    log = CommLog(2)
    for i in range(5):
        log.add(f"bucket {i}", "allgather", "float32", 2, 8)
    assert [r.name for r in log.records] == ["bucket 2", "bucket 3", "bucket 4"]
    assert log.totals() == {"allgather": Total(5, 20)}


def test_a_reset_starts_anew():
    log = CommLog(2)
    log.add("x", "allgather", "float32", 2, 8)
    log.reset()
    assert (log.totals(), list(log.records), log.moved) == ({}, [], 0)


def test_the_report_maps_operations_to_totals_and_adds_them_up():
    log = CommLog(2)
    log.add("a", "reducescatter", "float32", 1 << 20, 4 << 20)
    log.add("b", "allgather", "float32", 1 << 20, 4 << 20)
    log.add("c", "allgather", "float32", 1 << 20, 4 << 20)
    report = log.report()
    assert isinstance(report, Mapping)
    assert dict(report) == {
        "reducescatter": Total(1, 2 << 20),
        "allgather": Total(2, 4 << 20),
        "total": Total(3, 6 << 20),
    }
    assert report["total"].bytes == log.moved


def test_the_report_is_a_picture_of_its_moment():
    log = CommLog(2)
    report = log.report()
    log.add("a", "allgather", "float32", 2, 8)
    assert report == {"total": Total(0, 0)}


def test_the_report_reads_as_a_table():
    report = CommunicationReport(
        {"reducescatter": Total(1200, 3 << 30), "allgather": Total(8, 1 << 19)}
    )
    assert str(report).splitlines() == [
        "reducescatter  1,200 calls  3,072.00 MiB",
        "allgather          8 calls      0.50 MiB",
        "total          1,208 calls  3,072.50 MiB",
    ]
    assert "reducescatter" in repr(report)
