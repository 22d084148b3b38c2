"""Memory and time before the run: the arithmetic, against the paper, tables and published runs."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import spec_lists

from zerohvd.errors import DisagreementError
from zerohvd.layout import DTYPE_BYTES, ParamSpec, build_layout
from zerohvd.planning.choice import check_auto, choose_together
from zerohvd.planning.footprint import footprint
from zerohvd.planning.network import Link, Network, default_file, fit, load, of_bandwidth
from zerohvd.planning.plan import NothingFitsError, make_plan
from zerohvd.planning.sizes import parse_bytes, parse_count, parse_ranks, show_bytes, show_seconds
from zerohvd.planning.timeline import Event, Timeline, thinned
from zerohvd.planning.traffic import collectives, moved, step_time
from zerohvd.planning.workload import (
    OptimizerCost,
    Section,
    Workload,
    from_numbers,
    from_specs,
    units_by_name,
)
from zerohvd.testing import ThreadWorld

GB = 10**9


def one_decimal(count):
    return float(f"{count / GB:.1f}")


# -- the paper, and the table of the stages --------------------------------------------------------


def test_the_paper_says_7_5_billion_parameters_on_64_ranks_need_120_31_4_16_6_and_1_9_gb():
    paper = from_numbers(7_500_000_000, precision="mixed", optimizer="adam")
    held = [footprint(paper, stage, 64).states for stage in range(4)]
    assert [one_decimal(h) for h in held] == [120.0, 31.4, 16.6, 1.9]
    psi = 7_500_000_000
    exact = [16 * psi, 4 * psi + 12 * psi / 64, 2 * psi + 14 * psi / 64, 16 * psi / 64]
    assert held == [pytest.approx(e, rel=1e-6) for e in exact]


def test_and_so_for_the_papers_other_numbers_of_ranks():
    """Table 1 of "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"."""
    table = {
        7.5e9: {4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 1024: (30.1, 15.1, 0.12)},
        128e9: {1024: (513, 257, 2)},
    }
    for psi, ranks in table.items():
        model = from_numbers(int(psi), precision="mixed")
        for size, expected in ranks.items():
            held = [footprint(model, stage, size).states / GB for stage in (1, 2, 3)]
            assert held == [pytest.approx(e, rel=0.01, abs=0.05) for e in expected]


@pytest.mark.parametrize("size", [1, 2, 4, 64])
@pytest.mark.parametrize(
    ("precision", "width"),
    [("fp32", (4, 4, 8, 0)), ("mixed", (2, 2, 8, 4)), ("bf16", (2, 2, 4, 0))],
)
def test_the_table_of_the_stages(size, precision, width):
    count = 1 << 20
    model = from_numbers(count, precision=precision, layers=2)
    sharded = {0: (), 1: (2, 3), 2: (1, 2, 3), 3: (0, 1, 2, 3)}
    for stage, parts in sharded.items():
        held = footprint(model, stage, size)
        found = (held.params, held.grads, held.optimizer, held.master)
        each = [w / (size if i in parts else 1) for i, w in enumerate(width)]
        assert [f / count for f in found] == [pytest.approx(e, rel=1e-3) for e in each]


@given(spec_lists(), st.integers(1, 9), st.sampled_from(["adam", "sgd"]))
def test_a_higher_stage_never_keeps_more_and_all_ranks_together_keep_the_state_once(
    specs, size, optimizer
):
    model = from_specs(specs, [0] * len(specs), name="any", optimizer=optimizer)
    states = [footprint(model, stage, size).states for stage in range(4)]
    padding = 64 * 16 * size * max(1, len(specs)) * 16
    for lower, higher in itertools.pairwise(states):
        assert higher <= lower + padding
    state = {"adam": 2, "sgd": 0}[optimizer]
    whole = sum(s.numel * state * max(4, DTYPE_BYTES[s.dtype]) for s in specs)
    assert footprint(model, 0, size).optimizer == whole
    # Shards are of one length, but parameters are aligned: padding may lie in another rank's.
    assert whole / size - padding <= footprint(model, 2, size).optimizer <= whole


def test_a_model_without_parameters_needs_no_memory():
    nothing = from_specs([], [], name="nothing")
    assert [footprint(nothing, s, 4).peak for s in range(4)] == [0] * 4


def test_whole_parameters_are_counted_on_the_rank_that_holds_most():
    specs = [ParamSpec("large", (1000,)), ParamSpec("small", (10,))]

    def sections(stage, size):
        layout = build_layout(specs, size if stage else 1, partition="parameter")
        return [Section(layout, (0, 1), (None,) * len(layout.buckets))]

    state = OptimizerCost(name="rows", per_element={}, whole={0: 77, 1: 3})
    model = Workload(name="two", sections=sections, optimizer=state)
    assert footprint(model, 1, 4).optimizer == 77
    assert footprint(model, 0, 4).optimizer == 80


# -- a step ----------------------------------------------------------------------------------------

MIB = 1 << 20


def measured(*events, saved=0):
    return Timeline(tuple(Event(*e) for e in events), saved, "in a test")


def two_layers(timeline=None, **settings):
    specs = [ParamSpec(n, (MIB,)) for n in ("a", "b")]  # 4 MiB each

    def sections(stage, size):
        layout = build_layout(specs, size if stage else 1, bucket_bytes=4 * MIB)
        return [Section(layout, (0, 1), (None,) * len(layout.buckets))]

    cost = OptimizerCost(name="sgd", per_element={"float32": 0.0})
    return Workload(
        name="two", sections=sections, optimizer=cost, timeline=timeline, **settings
    )


def test_activations_and_gradients_meet_only_where_they_were_seen_together():
    # The largest activations are gone when the first gradient comes.
    early = measured((100 * MIB,), (10 * MIB, 1), (0, 0), saved=100 * MIB)
    assert footprint(two_layers(early), 0, 1).peak == (8 + 100) * MIB
    late = measured((100 * MIB,), (100 * MIB, 1), (100 * MIB, 0), saved=100 * MIB)
    assert footprint(two_layers(late), 0, 1).peak == (8 + 100 + 8) * MIB


def test_kinds_are_what_was_measured_and_unmeasured_is_said():
    seen = footprint(two_layers(measured((7,), saved=5)), 2, 2)
    assert seen.activations == 5
    assert seen.complete
    unseen = footprint(two_layers(), 2, 2)
    assert unseen.activations is None
    assert not unseen.complete


def test_what_an_optimizer_takes_for_its_largest_piece_counts_in_the_update():
    cost = OptimizerCost(name="greedy", per_element={"float32": 0.0}, temporary=400.0)
    model = two_layers()
    greedy = Workload(name="greedy", sections=model.sections, optimizer=cost)
    held = footprint(greedy, 0, 1)
    assert held.when == "update"
    assert held.peak == (8 + 8 + 400) * MIB


def test_events_are_thinned_without_losing_a_gradient_or_a_peak():
    events = [Event(5), Event(9), Event(3), Event(4), Event(4, 1), Event(1), Event(8), Event(2, 0)]
    kept = thinned(events)
    assert [e.param for e in kept if e.param >= 0] == [1, 0]
    assert max(e.live for e in kept) == 9
    assert Event(8) in kept
    assert len(kept) < len(events)


def test_stage_3_gathers_the_root_and_two_units():
    specs = [ParamSpec("root", (1000,)), *[ParamSpec(f"u{i}", (16 * 100 * i,)) for i in (1, 2, 3)]]
    model = from_specs(specs, [0, 1, 2, 3], name="units")
    assert footprint(model, 3, 2).gathered == pytest.approx(4 * (1000 + 1600 * 5), rel=0.05)
    assert footprint(model, 3, 1).gathered == 0
    assert footprint(from_numbers(1000), 3, 2).gathered is None


def test_traffic_is_the_table_of_the_design():
    psi = 1 << 22
    model, n = from_numbers(psi, layers=64), 4
    whole = 4 * psi * (n - 1) / n
    step = [moved(collectives(model, stage, n), n) for stage in range(4)]
    assert step[:3] == [2 * whole] * 3
    assert step[3] == pytest.approx(3 * whole, rel=0.02)  # two of 64 units stay gathered
    assert moved(collectives(model, 2, 1), 1) == 0


def test_units_are_found_by_names():
    names = ["embed.weight", "layers.0.w", "layers.0.b", "layers.1.w", "head.3.weight"]
    assert units_by_name(names) == [0, 1, 1, 2, 0]
    assert units_by_name(["h_0/kernel", "h_1/kernel"]) == [1, 2]
    assert units_by_name([]) == []


# -- the network -----------------------------------------------------------------------------------


def test_a_collective_costs_latency_per_rank_and_bytes_over_bandwidth():
    link = Link(alpha=1e-5, beta=1e9)
    assert link.seconds(8e9, 4) == pytest.approx(3e-5 + 0.75 * 8)
    net = Network(links={"": link})
    assert net.seconds("allgather", 8e9, 4) == link.seconds(8e9, 4)
    assert net.seconds("allreduce", 8e9, 4) == 2 * link.seconds(8e9, 4)
    # A reducescatter has no response cache: its negotiation costs in every step.
    assert net.seconds("reducescatter", 8e9, 4) == link.seconds(8e9, 4) + 4 * 2 * 1e-5
    assert net.seconds("allreduce", 8e9, 1) == 0


@given(st.floats(1e-7, 1e-3), st.floats(1e7, 1e11))
def test_a_fit_finds_the_link_behind_its_points(alpha, beta):
    link = Link(alpha, beta)
    points = [(m, n, link.seconds(m, n)) for m in (1e3, 1e6, 1e8) for n in (2, 4)]
    found = fit(points)
    for m, n, s in points:
        assert found.seconds(m, n) == pytest.approx(s, rel=1e-3)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.integers(2, 64), st.floats(1e-6, 10)), min_size=1))
def test_a_fit_of_anything_is_a_link(points):
    link = fit(points)
    assert link.alpha >= 0
    assert link.beta > 0


def test_a_step_lies_between_full_overlap_and_none():
    model, net = from_numbers(10**8), of_bandwidth(10)
    found = collectives(model, 2, 8)
    alone = step_time(found, 8, net)
    with_compute = step_time(found, 8, net, compute=5.0)
    assert with_compute.least == pytest.approx(5.0 + net.cycle)
    assert with_compute.most == pytest.approx(5.0 + alone.most)
    busy = sum(net.seconds(c.op, c.nbytes, 8) for c in found)
    assert alone.most == pytest.approx(busy + len(found) * 1e-3)
    assert step_time([], 1, net, 2.0) == (2.0, 2.0)


def test_what_horovod_published_lies_in_the_bracket():
    """512 Pascal GPUs, 25 Gbit/s: 90 % for ResNet-101, 68 % for VGG-16 (arXiv:1802.05799).

    Seconds per step of one GPU at batch 64: about 130 images/s for ResNet-101 and 150 for VGG-16,
    as TensorFlow's benchmarks of that time say. A ring crosses each host's link once.
    """
    net = of_bandwidth(25, latency=1e-5)
    for count, images, efficiency in ((44.5e6, 130, 0.90), (138e6, 150, 0.68)):
        compute = 64 / images
        model = from_numbers(int(count), bucket_bytes=64 * MIB)  # Horovod's fusion threshold
        time = step_time(collectives(model, 0, 512), 512, net, compute)
        assert compute / time.most < efficiency < compute / time.least


def test_a_network_file_comes_back_as_it_was(tmp_path):
    net = Network(links={"allgather": Link(1e-5, 2e9), "": Link(2e-5, 1e9)}, name="here")
    file = tmp_path / "network.json"
    file.write_text(json.dumps(net.as_dict()))
    assert load(file) == net


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"links": {"a": {"alpha": -1, "beta": 1}}}'])
def test_a_file_that_is_none_is_refused(tmp_path, text):
    file = tmp_path / "network.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="no network file"):
        load(file)
    with pytest.raises(ValueError, match="cannot be read"):
        load(tmp_path / "missing.json")


def test_measurements_are_stored_where_caches_are():
    found = default_file({"XDG_CACHE_HOME": "/some/cache"})
    assert str(found) == "/some/cache/zerohvd/network.json"


# -- plans -----------------------------------------------------------------------------------------


def test_the_lowest_stage_that_fits_on_the_fewest_ranks_is_chosen():
    model = from_numbers(7_500_000_000, precision="mixed", layers=32)
    plan = make_plan(model, [64, 256], memory="16GiB")
    assert plan.fits
    assert (plan.chosen().stage, plan.chosen().size) == (2, 64)
    assert plan.stage == 2
    assert "stage 2 on 64 ranks: 15.5 GiB per rank of 16.0 GiB" in plan.recommendation
    assert "stage 1 needs 29.2 GiB" in plan.recommendation
    assert "not counted: activations" in plan.recommendation


def test_where_nothing_fits_the_plan_says_how_much_is_missing():
    plan = make_plan(from_numbers(10**9, layers=10), [2, 4], memory="1GB")
    assert plan.fits is False
    assert plan.chosen() is None
    assert "nothing fits into 1.0 GB per rank: the least is" in plan.recommendation
    assert "stage 3 on 4 ranks" in plan.recommendation
    with pytest.raises(NothingFitsError, match="nothing fits"):
        _ = plan.stage


def test_without_a_limit_the_least_that_moves_no_more_is_chosen():
    plan = make_plan(from_numbers(10**9, layers=10), [8])
    assert plan.fits is None
    assert plan.stage == 2


def test_a_plan_is_a_json_document():
    plan = make_plan(from_numbers(10**6), [2], memory="1GiB", network=of_bandwidth(10))
    found = json.loads(json.dumps(plan.as_dict()))
    assert [r["stage"] for r in found["rows"]] == [0, 1, 2, 3]
    assert found["rows"][1]["seconds"]["least"] <= found["rows"][1]["seconds"]["most"]
    assert found["rows"][0]["activations"] is None
    assert found["chosen"] == {"stage": 0, "ranks": 2}
    assert str(plan).endswith(plan.recommendation)


def test_a_row_is_found_by_stage_and_ranks():
    plan = make_plan(from_numbers(1000), [2, 4])
    assert plan.row(1, 4).size == 4
    with pytest.raises(ValueError, match="no single row"):
        plan.row(1)


@pytest.mark.parametrize("ranks", [[0], [-1], [True], [1.5], ["2"]])
def test_numbers_of_ranks_are_positive_integers(ranks):
    with pytest.raises(ValueError, match="ranks must be positive integers"):
        make_plan(from_numbers(10), ranks)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="precision must be one of fp32, mixed, bf16"):
        from_numbers(10, precision="fp17")
    with pytest.raises(ValueError, match="the optimizer must be one of adam, adamw"):
        from_numbers(10, optimizer="magic")
    with pytest.raises(ValueError, match="layers must be between 1 and the 10 parameters"):
        from_numbers(10, layers=11)
    with pytest.raises(ValueError, match="compute must be a number of seconds"):
        make_plan(from_numbers(10), [1], compute=math.nan)
    with pytest.raises(ValueError, match=r"stage must be one of \(0, 1, 2, 3\)"):
        footprint(from_numbers(10), 4, 1)


def test_ten_thousand_ranks_are_planned_in_no_time():
    plan = make_plan(from_numbers(10**10, precision="mixed", layers=96), [8, 10_000])
    assert plan.row(3, 10_000).memory.states == pytest.approx(16 * 10**10 / 10_000, rel=0.02)


# -- all ranks choose the same ---------------------------------------------------------------------


def test_all_ranks_take_the_highest_stage_that_one_of_them_needs(capsys):
    model = from_numbers(10**6, layers=4)

    def choose(ranks):
        memory = "20MB" if ranks.rank == 0 else "11MB"
        return choose_together(ranks, lambda: make_plan(model, [3], memory=memory))

    alone = [make_plan(model, [3], memory=m).stage for m in ("20MB", "11MB")]
    assert alone[0] < alone[1]
    assert ThreadWorld(3).run(choose) == [alone[1]] * 3
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"zerohvd: stage='auto' takes stage {alone[1]} on 3 ranks: ")


def test_where_nothing_fits_on_one_rank_all_ranks_raise():
    model = from_numbers(10**6)

    def choose(ranks):
        memory = "20MB" if ranks.rank == 0 else "1MB"
        with pytest.raises(NothingFitsError, match=r"nothing fits into 1\.0 MB"):
            choose_together(ranks, lambda: make_plan(model, [2], memory=memory))
        return True

    assert ThreadWorld(2).run(choose) == [True] * 2


def test_a_rank_that_cannot_plan_does_not_leave_the_others_waiting():
    def choose(ranks):
        expected = ValueError if ranks.rank == 1 else DisagreementError
        with pytest.raises(expected, match=r"expected a size|rank 1 could not plan"):
            choose_together(
                ranks,
                lambda: make_plan(
                    from_numbers(10), [2], memory="lots" if ranks.rank == 1 else "1GB"
                ),
            )
        return True

    assert ThreadWorld(2).run(choose) == [True] * 2


def test_auto_needs_a_memory_and_memory_needs_auto():
    assert check_auto("auto", "1GiB")
    assert not check_auto(2, None)
    with pytest.raises(ValueError, match="needs the memory of a rank"):
        check_auto("auto", None)
    with pytest.raises(ValueError, match="'auto' only, not 2"):
        check_auto(2, "1GiB")
    with pytest.raises(ValueError, match="0, 1, 2, 3 or 'auto', got 'best'"):
        check_auto("best", None)


# -- numbers as people write them ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [("16GiB", 16 << 30), ("16GB", 16 * 10**9), ("1.5 MiB", 3 << 19), ("512", 512), (1e9, 10**9),
     ("2KB", 2000), ("40g", 40 * 10**9), ("1e9", 10**9)],
)  # fmt: skip
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "lots", "GiB", "-1GB", "0", "1..2GB", "16GiBB", "1e999"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)
    with pytest.raises(TypeError, match="memory must be a size"):
        parse_bytes([text])


@pytest.mark.parametrize(
    ("text", "count"),
    [("7.5e9", 7_500_000_000), ("7.5B", 7_500_000_000), ("350M", 350_000_000), ("1_000", 1000)],
)
def test_numbers_of_parameters_are_read(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-3", "many", "1e30", "nan"])
def test_what_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(ValueError, match="expected a number of parameters"):
        parse_count(text)


def test_numbers_of_ranks_are_read():
    assert parse_ranks("8, 16,64,8") == (8, 16, 64)
    for text in ("", "0", "8,", "a", "-1", "1.5"):
        with pytest.raises(ValueError, match="expected numbers of ranks"):
            parse_ranks(text)


@pytest.mark.parametrize(
    ("count", "text", "binary"),
    [(31.4e9, "31.4 GB", "29.2 GiB"), (999, "999 B", "999 B"), (1000, "1.0 kB", "1000 B"),
     (999_960_000, "1.0 GB", "953.6 MiB"), (0, "0 B", "0 B"), (5e15, "5.0 PB", "4.4 PiB")],
)  # fmt: skip
def test_sizes_are_shown(count, text, binary):
    assert show_bytes(count) == text
    assert show_bytes(count, binary=True) == binary


def test_seconds_are_shown():
    assert [show_seconds(s) for s in (2e-5, 0.0123, 3.21, 12345)] == [
        "20 µs", "12.3 ms", "3.21 s", "12,345 s",
    ]  # fmt: skip
