"""Records, sinks, stragglers and traces, without a framework."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
import math
import sys
import time
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerohvd.communication.log import CommLog, Record
from zerohvd.memory import MemoryReport
from zerohvd.monitoring.meter import Meter, Split, split_of
from zerohvd.monitoring.session import Session, State
from zerohvd.monitoring.sinks import ConsoleSink, CsvSink, JsonLinesSink, open_sinks
from zerohvd.monitoring.stragglers import find_straggler
from zerohvd.monitoring.trace import Trace, merge
from zerohvd.testing import ThreadWorld

# -- time ------------------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up_to_it():
    log, meter = CommLog(2), Meter()
    log.watchers.append(meter)
    assert meter.end_step() is None
    time.sleep(0.02)  # compute
    with log.waiting("backward"):
        time.sleep(0.01)
        with log.waiting("a wait inside of it"):
            time.sleep(0.01)
    meter.begin_update()
    with log.waiting("the rest"):
        time.sleep(0.01)
    time.sleep(0.02)
    split = meter.end_step()
    assert sum(split[1:]) == pytest.approx(split.seconds)
    assert split.communication == pytest.approx(0.03, abs=0.01)
    assert split.compute == pytest.approx(0.02, abs=0.01)
    assert split.update == pytest.approx(0.02, abs=0.01)
    after = meter.end_step()
    assert after.communication == after.update == 0.0


spans = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)).map(sorted).map(tuple))


@given(spans, st.floats(0, 10), st.booleans())
def test_the_parts_of_a_measured_step_add_up_to_it(collectives, gradients, everywhere):
    split = split_of(0.0, 10.0, gradients, collectives, everywhere=everywhere)
    assert split.seconds == 10.0
    assert sum(split[1:]) == pytest.approx(10.0)
    assert all(part >= -1e-9 for part in split)


def test_overlapping_collectives_count_once_and_those_behind_compute_not_at_all():
    collectives = [(1.0, 4.0), (5.5, 7.0), (6.0, 8.0)]
    assert split_of(0, 10, 5, collectives) == Split(10, 5.0, 2.5, 2.5)
    assert split_of(0, 10, 5, collectives, everywhere=True) == Split(10, 2.0, 5.5, 2.5)


# -- stragglers ------------------------------------------------------------------------------------


@given(st.integers(2, 64), st.data())
def test_the_rank_that_waits_least_is_named_with_its_host(size, data):
    slow = data.draw(st.integers(0, size - 1))
    waits = [0.001 if r == slow else 0.021 for r in range(size)]
    found = find_straggler(waits, 0.1, [f"h{r}" for r in range(size)], range(size))
    assert (found.rank, found.host) == (slow, f"h{slow}")
    assert found.behind == pytest.approx(0.02)
    assert str(found) == f"rank {slow} (h{slow}) +20 ms"


@pytest.mark.parametrize("waits", [[0.01] * 4, [0.01, 0.0115], [0.0], [1.0, 1.02, 1.01]])
def test_ranks_that_differ_as_ranks_always_do_are_not_named(waits):
    assert find_straggler(waits, 1.0, [], range(len(waits))) is None


# -- records ---------------------------------------------------------------------------------------


def run_session(collectives, steps, every=4, **options):
    """A session over a ThreadWorld, with a rank 1 that waits less."""

    class Gathered:
        def __init__(self, own):
            own = np.array(own)
            self.out = np.zeros(collectives.size * own.size)
            lengths = [own.size] * collectives.size
            self.handle = collectives.gather_into(self.out, own, lengths, name="watched")

        def result(self):
            self.handle.wait()
            return self.out.reshape(collectives.size, -1).tolist()

    kept = []

    class Sink:
        log = kept.append

    log = CommLog(collectives.size)
    log.add("g", "allreduce", "float32", 10, 40)
    state = State(MemoryReport(params=8), log.report(), square=4.0)
    hosts = [f"h{r}" for r in range(collectives.size)]
    session = Session(
        Gathered, rank=collectives.rank, hosts=hosts, every=every, sinks=[Sink()], **options
    )
    wait = 0.01 if collectives.rank == 1 else 0.03
    for step in range(steps):
        session.log(loss=float(collectives.rank), lr=0.1 * step)
        split = None if step == 0 else Split(0.1, 0.09 - wait, wait, 0.01)
        session.end_step(split, lambda: state, skipped=int(step in (2, 5)))
    session.finish()
    return kept, session


def test_a_record_is_of_all_ranks_and_every_rank_has_it():
    results = ThreadWorld(3).run(run_session, 8)
    assert [len(kept) for kept, _ in results] == [2, 0, 0]
    first, last = results[0][0]
    assert (first["step"], last["step"]) == (4, 8)
    assert last["loss"] == 1.0  # the mean over the ranks
    assert last["lr"] == pytest.approx(0.55)  # the first rank's, over the steps
    assert last["grad_norm"] == pytest.approx(math.sqrt(12))
    assert (first["skipped"], last["skipped"], last["skipped_total"]) == (1, 1, 2)
    assert last["bytes/allreduce"] == 54 and last["memory/params"] == 8
    assert last["slowest"] == "rank 1 (h1) +20 ms"
    assert "samples_per_second" not in last
    assert {session.last["slowest_rank"] for _, session in results} == {1}


def test_samples_are_counted_over_all_ranks():
    (kept, _), *_ = ThreadWorld(2).run(lambda c: run_session(c, 4, samples=16))
    assert kept[0]["samples_per_second"] == pytest.approx(32 / 0.1)


def test_records_of_a_run_that_is_resumed_go_on_from_there():
    (kept, _), *_ = ThreadWorld(2).run(lambda c: run_session(c, 8, start=1003 + c.rank))
    assert [r["step"] for r in kept] == [1007, 1011]


# -- sinks -----------------------------------------------------------------------------------------


def record():
    (kept, _), *_ = ThreadWorld(2).run(run_session, 4)
    return kept[0]


def test_files_hold_what_was_logged_and_go_on_where_they_were(tmp_path):
    given = record()
    for name in ("run.jsonl", "run.csv"):
        for step in (4, 8):
            (sink,) = open_sinks(tmp_path / "new" / name)  # as a run that is resumed
            sink.log({**given, "step": step, "loss": math.nan if step == 8 else 0.5})
    lines = [json.loads(x) for x in (tmp_path / "new/run.jsonl").read_text().splitlines()]
    assert [r["step"] for r in lines] == [4, 8]
    assert [r["loss"] for r in lines] == [0.5, None]
    with (tmp_path / "new/run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["step"]) for r in rows] == [4, 8]
    assert float(rows[0]["time/step"]) == given["time/step"]
    assert not any(key.startswith("ranks/") for key in rows[0])


def test_tensorboards_own_reader_reads_the_events(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    # Its reader without TensorFlow: nothing here loads a framework.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", types.ModuleType("notf"))
    loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    (sink,) = open_sinks(f"tensorboard:{tmp_path}/events")
    given = record()
    sink.log({**given, "step": 1 << 40})
    (path,) = (tmp_path / "events").iterdir()
    events = list(loader.LegacyEventFileLoader(str(path)).Load())
    assert events[0].file_version == "brain.Event:2"
    assert (events[1].step, events[1].wall_time) == (1 << 40, given["wall_time"])
    values = {v.tag: v.simple_value for v in events[1].summary.value}
    numbers = {k: v for k, v in given.items() if isinstance(v, (int, float))}
    assert set(values) == set(numbers) - {"step", "wall_time"}
    assert values["time/step"] == pytest.approx(given["time/step"])


def test_the_console_gets_one_line():
    stream = io.StringIO()
    ConsoleSink(stream).log({**record(), "loss_scale": 4.0, "samples_per_second": 10.0})
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("zerohvd: step 4 | loss 0.5 | 100 ms (compute ")
    assert line.endswith("slow: rank 1 (h1) +20 ms")


@pytest.mark.parametrize("wrong", ["run.txt", "tensorboard:", 3, [object()]])
def test_what_is_no_sink_is_refused_also_by_ranks_that_do_not_write(wrong):
    for write in (True, False):
        with pytest.raises((TypeError, ValueError), match=r"\.jsonl"):
            open_sinks(wrong, write=write)


def test_sinks_may_be_given_one_by_one_or_none(tmp_path):
    found = open_sinks(["console", tmp_path / "a.csv", None])
    assert [type(s) for s in found] == [ConsoleSink, CsvSink]
    assert open_sinks(str(tmp_path / "b.jsonl"), write=False) == []
    assert type(open_sinks(tmp_path / "b.jsonl")[0]) is JsonLinesSink
    assert open_sinks(()) == []


# -- traces ----------------------------------------------------------------------------------------


def traced(folder, rank, host="h", shift=0.0, count=3, limit=1 << 20):
    trace = Trace(folder, rank, host, limit)
    for i in range(count):
        name = f"zero0.0/s0/b{i % 4}/reducescatter/layer.{i % 4}.weight"
        start = 100.0 + shift + i
        trace.collective(Record(name, "reducescatter", "float32", 10, 40, 20), start, start + 0.5)
        trace.waited(name, start + 0.25, start + 0.5 + 1e-4 * rank)
        trace.span(f"step {i}", start, start + 0.9)
    trace.flush()


def test_traces_of_all_ranks_become_one_with_names_of_parameters(tmp_path):
    for rank in range(3):
        traced(tmp_path, rank)
    merged = merge(tmp_path)
    json.dumps(merged)
    events = [e for e in merged["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == {0, 1, 2}
    titles = {e["name"] for e in events}
    assert {"reducescatter layer.0.weight", "step 2"} <= titles
    one = next(e for e in events if e["cat"] == "reducescatter")
    assert one["args"] | {"bucket": "b0", "parameter": "layer.0.weight"} == one["args"]
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    assert {e["pid"] for e in merge(tmp_path, [1])["traceEvents"]} == {1}


def test_collectives_that_overlap_have_rows_of_their_own(tmp_path):
    log, trace = CommLog(2), Trace(tmp_path, 0)
    log.watchers.append(trace)
    for name in ("a", "b"):
        log.add(name, "allreduce", "float32", 1, 4)
    log.ended("a")
    log.add("c", "allreduce", "float32", 1, 4)
    log.ended("c")
    log.ended("b")
    trace.flush()
    rows = {e["name"]: e["tid"] for e in merge(tmp_path)["traceEvents"] if e["ph"] == "X"}
    assert rows["allreduce a"] == rows["allreduce c"] != rows["allreduce b"]


def test_clocks_of_other_hosts_are_aligned(tmp_path):
    traced(tmp_path, 0, "one")
    traced(tmp_path, 1, "two", shift=5.0)
    ends = {}
    for event in merge(tmp_path)["traceEvents"]:
        if event.get("cat") == "wait":
            ends.setdefault(event["args"]["n"], {}).setdefault(event["pid"], []).append(
                event["ts"] + event["dur"]
            )
    for by_rank in ends.values():
        assert by_rank[0] == pytest.approx(by_rank[1], abs=1.0)  # microseconds


def test_a_trace_is_bounded_and_keeps_the_latest(tmp_path):
    limit = 1 << 18
    traced(tmp_path, 0, count=5000, limit=limit)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) <= limit and len(sizes) == 2
    steps = [e["name"] for e in merge(tmp_path)["traceEvents"] if e.get("cat") == "step"]
    assert steps[-1] == "step 4999" and len(steps) > 100
    numbers = [int(s.split()[1]) for s in steps]
    assert all(b - a == 1 for a, b in itertools.pairwise(numbers))


def test_a_trace_that_was_cut_off_can_be_read(tmp_path):
    traced(tmp_path, 0)
    path = tmp_path / "rank00000.0.json"
    path.write_text(path.read_text()[:-30])
    assert len([e for e in merge(tmp_path)["traceEvents"] if e["ph"] == "X"]) == 8


def test_a_folder_without_traces_is_refused_with_the_way_to_make_them(tmp_path):
    with pytest.raises(ValueError, match="ZEROHVD_TRACE"):
        merge(tmp_path)
