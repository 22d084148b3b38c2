"""What a rank holds at every stage: the table of ZeRO, plus padding and what is in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import gpt2, layouts

from zerohvd.layout import ParamSpec, build_layout
from zerohvd.memory import MemoryReport, estimate, format_bytes

COUNT = 1 << 22  # elements, a multiple of any number of ranks used here


def model(dtype="float32", size=4, **settings):
    half = COUNT // 2
    specs = [ParamSpec("a", (half,), dtype, "u0"), ParamSpec("b", (half,), dtype, "u1")]
    return build_layout(specs, size, **settings)


def held(stage, dtype="float32", size=4):
    """Bytes per element, without what is in flight."""
    report = estimate(model(dtype, size), stage=stage)
    parts = (report.params, report.grads, report.optimizer, report.master)
    return tuple(part / COUNT for part in parts)


@pytest.mark.parametrize("size", [1, 2, 4, 64])
def test_the_table_for_float32_and_adam(size):
    assert held(None, size=size) == (4, 4, 8, 0)
    assert held(0, size=size) == (4, 4, 8, 0)
    assert held(1, size=size) == (4, 4, 8 / size, 0)
    assert held(2, size=size) == (4, 4 / size, 8 / size, 0)
    assert held(3, size=size) == (4 / size, 4 / size, 8 / size, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 4, 64])
def test_the_table_for_16_bit_parameters_with_a_float32_master(size, dtype):
    assert held(None, dtype, size) == (2, 2, 8, 4)
    assert held(1, dtype, size) == (2, 2, 8 / size, 4 / size)
    assert held(2, dtype, size) == (2, 2 / size, 8 / size, 4 / size)
    assert held(3, dtype, size) == (2 / size, 2 / size, 8 / size, 4 / size)


def test_other_optimizers_gradients_and_masters():
    layout = model("bfloat16")
    assert estimate(layout, stage=0, state_per_param=0).optimizer == 0
    assert estimate(layout, stage=0, state_per_param=1).optimizer == 4 * COUNT
    assert estimate(layout, stage=0, grad_dtype="float32").grads == 4 * COUNT
    own = estimate(layout, stage=0, master_dtype="bfloat16")
    assert (own.master, own.optimizer) == (0, 4 * COUNT)
    assert estimate(model(), stage=1, master_dtype="float64").master == 8 * COUNT // 4


def test_in_flight_are_two_buckets_and_at_stage_3_two_units():
    layout = model(bucket_bytes=1 << 20)
    largest = 2 * max(b.nbytes for b in layout.buckets)
    assert [estimate(layout, stage=s).buffers for s in (None, 0)] == [0, 0]
    assert [estimate(layout, stage=s).buffers for s in (1, 2)] == [largest] * 2
    assert estimate(layout, stage=3).buffers == largest + 4 * COUNT
    assert estimate(layout, stage=3, in_flight=1).buffers == largest // 2 + 2 * COUNT


@given(layouts(), st.integers(0, 3))
def test_a_higher_stage_never_needs_more_apart_from_gathered_units(layout, state):
    stages = [estimate(layout, stage=s, state_per_param=state) for s in (0, 1, 2, 3)]
    kept = [report.total - report.buffers for report in stages]
    assert kept == sorted(kept, reverse=True)
    assert stages[2].total <= stages[1].total


@given(layouts(), st.sampled_from([1, 2, 3]))
def test_the_shards_of_all_ranks_hold_the_model_and_its_padding_once(layout, stage):
    each = [estimate(layout, stage=stage, rank=r) for r in range(layout.size)]
    together = sum(report.optimizer for report in each)
    assert together == estimate(layout, stage=0).optimizer
    if stage == 3:
        assert sum(report.params for report in each) == sum(b.nbytes for b in layout.buckets)


@given(layouts(), st.sampled_from([1, 2, 3]))
def test_unless_a_rank_is_named_the_estimate_is_that_of_the_fullest(layout, stage):
    each = [estimate(layout, stage=stage, rank=r).total for r in range(layout.size)]
    assert estimate(layout, stage=stage).total == max(each)


def test_plain_horovod_is_estimated_without_padding():
    layout = build_layout([ParamSpec("w", (5,))], 4)
    assert estimate(layout, stage=None).params == 20
    assert estimate(layout, stage=0).params == 4 * layout.buckets[0].padded > 20


def test_gpt2_on_eight_ranks():
    layout = build_layout(gpt2(), 8)
    plain, sharded = (estimate(layout, stage=s) for s in (None, 2))
    assert plain.total == 16 * layout.numel
    assert sharded.total < 0.45 * plain.total


def test_a_model_without_elements_needs_no_memory():
    for stage in (None, 0, 1, 2, 3):
        assert estimate(build_layout([], 4), stage=stage).total == 0


@pytest.mark.parametrize("stage", [-1, 4, "2"])
def test_a_stage_that_does_not_exist_is_refused(stage):
    with pytest.raises(ValueError, match=r"stage must be None or one of \(0, 1, 2, 3\)"):
        estimate(model(), stage=stage)


def test_negative_optimizer_state_is_refused():
    with pytest.raises(ValueError, match="state_per_param must not be negative"):
        estimate(model(), stage=1, state_per_param=-1)


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


def test_an_estimate_says_what_it_is_for():
    assert str(estimate(model(), stage=2)).startswith("stage 2, 4 ranks, per rank:\nparams")
    assert str(estimate(model(), stage=None)).startswith("plain Horovod, 4 ranks, per rank:\n")


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
