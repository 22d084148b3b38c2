"""zero.Monitor: its numbers are right, and it names the rank that is slow."""

from __future__ import annotations

import csv
import json
import math
import time

import horovod.torch as hvd
import pytest
import torch
from training import STAGES, batch, loss_of, make_model, sharded

import zerohvd.torch as zero
from zerohvd.monitoring.trace import merge


class Kept:
    """A sink like a run of Weights & Biases."""

    def __init__(self):
        self.records = []

    def log(self, record):
        self.records.append(record)


def train(model, opt, monitor, steps, before=None, **logged):
    for step in range(steps):
        opt.zero_grad()
        loss = loss_of(model, batch(step, hvd.rank()))
        loss.backward()
        if before is not None:
            before()
        opt.step()
        monitor.log(loss=loss, **logged)


@pytest.mark.parametrize("stage", STAGES)
def test_a_record_says_where_the_time_went_and_what_was_moved_and_held(stage):
    model, opt = sharded(stage=stage)
    kept = Kept()
    monitor = zero.Monitor(opt, every=4, samples=8, to=kept)
    norms = []
    train(model, opt, monitor, 8, lr=0.5)
    moved, held = zero.communication_report(opt), zero.memory_report(opt)
    norms.append(opt.grad_norm())
    monitor.close()
    assert [r["step"] for r in kept.records] == ([4, 8] if hvd.rank() == 0 else [])
    last = monitor.last  # on every rank
    parts = last["time/compute"] + last["time/communication"] + last["time/update"]
    assert parts == pytest.approx(last["time/step"], rel=1e-9)
    assert last["time/update"] > 0 and last["time/compute"] > 0
    assert last["samples_per_second"] == pytest.approx(8 * hvd.size() / last["time/step"])
    assert {op: last[f"bytes/{op}"] for op in moved} == {op: t.bytes for op, t in moved.items()}
    assert {kind: last[f"memory/{kind}"] for kind in held} == dict(held)
    assert last["memory/peak"] > last["memory/total"]
    assert last["grad_norm"] == pytest.approx(norms[0], rel=1e-5)
    assert last["lr"] == 0.5 and math.isfinite(last["loss"])
    assert last["skipped"] == last["skipped_total"] == 0
    assert len(last["ranks/communication"]) == hvd.size()


def test_the_loss_is_that_of_all_ranks():
    _, opt = sharded(stage=2, steps=0)
    model, opt = sharded(stage=2)
    monitor = zero.Monitor(opt, every=2, to=())
    losses = []
    for step in range(2):
        opt.zero_grad()
        loss = loss_of(model, batch(step, hvd.rank()))
        loss.backward()
        monitor.log(loss=loss)
        losses.append(loss.detach())
        opt.step()
    monitor.close()
    mean = hvd.allreduce(torch.stack(losses).mean(), name="mean loss")
    assert monitor.last["loss"] == pytest.approx(mean.item())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_is_slow_by_20_ms_is_named_within_20_steps(stage):
    if hvd.size() == 1:
        pytest.skip("nobody waits for a rank alone")
    model, opt = sharded(stage=stage)
    kept = Kept()
    monitor = zero.Monitor(opt, to=kept)
    slow = hvd.size() - 1

    def before():
        if hvd.rank() == slow:
            time.sleep(0.02)

    train(model, opt, monitor, 20, before)
    monitor.close()
    assert monitor.last["ranks/compute"][slow] > 0.02
    if hvd.rank() != 0:
        return
    # Of two records one will do: more ranks than cores are slow by turns.
    named = [r for r in kept.records if r["slowest_rank"] == slow]
    assert named, [(r["slowest"], r["ranks/communication"]) for r in kept.records]
    assert f"rank {slow} (" in named[0]["slowest"]
    assert 0.01 < named[0]["slowest_behind"] < 0.5
    # The others wait for it: their time is exposed communication, and its own is compute.
    waits = named[0]["ranks/communication"]
    assert all(w > 0.01 for r, w in enumerate(waits) if r != slow)


def test_a_closure_is_compute():
    model, opt = sharded(stage=2)
    monitor = zero.Monitor(opt, every=2, to=())

    def closure():
        time.sleep(0.05)
        opt.zero_grad()
        loss = loss_of(model, batch(0, hvd.rank()))
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)
    monitor.close()
    assert monitor.last["time/compute"] > 0.05
    assert monitor.last["time/update"] < monitor.last["time/compute"]


def test_skipped_steps_and_the_loss_scale_are_counted():
    model, opt = sharded(stage=2)
    kept = Kept()
    monitor = zero.Monitor(opt, every=3, to=kept)
    scaler = zero.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step in range(6):
        opt.zero_grad()
        loss = loss_of(model, batch(step, hvd.rank()))
        if step in (1, 4, 5) and hvd.rank() == 0:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    monitor.close()
    assert (monitor.last["skipped"], monitor.last["skipped_total"]) == (2, 3)
    assert monitor.last["loss_scale"] == 1.0  # before the update that follows the third
    if hvd.rank() == 0:
        assert [r["skipped"] for r in kept.records] == [1, 2]


def test_the_norm_is_that_before_clipping():
    model, opt = sharded(stage=2)
    monitor = zero.Monitor(opt, every=1, to=())
    seen = []
    train(model, opt, monitor, 2, lambda: seen.append(opt.clip_grad_norm_(1e-3).item()))
    opt.zero_grad()
    monitor.close()
    assert monitor.last["grad_norm"] == pytest.approx(seen[-1])
    assert seen[-1] > 1e-2


def test_files_can_be_read(tmp_path):
    shared = tmp_path if hvd.rank() == 0 else None
    model, opt = sharded(stage=2)
    folder = zero.broadcast_object(str(shared), name="folder")
    to = [f"{folder}/run.jsonl", f"{folder}/run.csv", f"tensorboard:{folder}/events"]
    monitor = zero.Monitor(opt, every=2, to=to, trace=f"{folder}/trace")
    train(model, opt, monitor, 4)
    monitor.close()
    zero.allreduce(torch.zeros(1), name="all have written")
    if hvd.rank() != 0:
        return
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["step"] for r in lines] == [2, 4] == [int(r["step"]) for r in rows]
    assert [r["loss"] for r in lines] == [float(r["loss"]) for r in rows]
    traced = merge(tmp_path / "trace")["traceEvents"]
    assert {e["pid"] for e in traced} == set(range(hvd.size()))
    if hvd.size() > 1:
        named = {e["args"].get("parameter") for e in traced if e["ph"] == "X"}
        assert opt.sections[0].named[-1].name in named


def test_scripts_without_a_monitor_are_traced_by_an_environment_variable(tmp_path, monkeypatch):
    folder = zero.broadcast_object(str(tmp_path), name="folder")
    monkeypatch.setenv("ZEROHVD_TRACE", folder)
    _, opt = sharded(stage=3, steps=3)
    opt.collectives.log.watchers[0].flush()
    zero.allreduce(torch.zeros(1), name="all have written")
    events = [e for e in merge(folder)["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in events if e["cat"] == "step"} == {"step 2", "step 3"}
    if hvd.size() > 1:
        assert {e["pid"] for e in events} == set(range(hvd.size()))
        kinds = {e["cat"] for e in events}
        assert {"allgather", "reducescatter", "wait"} <= kinds


@pytest.mark.parametrize("who", ["made on one rank", "closed on one rank", "another every"])
def test_ranks_that_do_not_all_have_a_monitor_are_told_at_once(who):
    if hvd.size() == 1:
        pytest.skip("there is nobody to differ from")
    model, opt = sharded(stage=2)
    monitor = None
    if who != "made on one rank" or hvd.rank() == 0:
        every = 5 + (who == "another every" and hvd.rank() == 1)
        monitor = zero.Monitor(opt, every=every, to=())
    if who == "closed on one rank" and hvd.rank() == 0:
        monitor.close()
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(zero.DisagreementError, match=r"zero\.Monitor"):
        opt.step()


def test_a_monitor_that_is_closed_leaves_nothing_behind():
    model, opt = sharded(stage=2)
    monitor = zero.Monitor(opt, every=1, to=())
    with pytest.raises(ValueError, match="already"):
        zero.Monitor(opt)
    train(model, opt, monitor, 2)
    monitor.close()
    assert not opt.collectives.log.watchers and opt.watcher is None
    last = monitor.last
    train(model, opt, monitor, 2)
    assert monitor.last is last
    zero.Monitor(opt, to=()).close()


def test_what_is_no_optimizer_and_no_sink_is_refused():
    with pytest.raises(TypeError, match="DistributedOptimizer"):
        zero.Monitor(torch.optim.SGD(make_model().parameters(), 0.1))
    _, opt = sharded(stage=1)
    with pytest.raises(ValueError, match=r"\.jsonl"):
        zero.Monitor(opt, to="run.txt")
    with pytest.raises(TypeError, match="log"):
        zero.Monitor(opt, to=[3])
    with pytest.raises(ValueError, match="every"):
        zero.Monitor(opt, every=0)


def test_a_sink_that_fails_does_not_end_the_training(recwarn):
    class Full:
        def log(self, record):
            raise OSError("no space left on device")

    model, opt = sharded(stage=2)
    monitor = zero.Monitor(opt, every=1, to=Full())
    train(model, opt, monitor, 3)
    monitor.close()
    said = [str(w.message) for w in recwarn if "no space left" in str(w.message)]
    assert len(said) == (hvd.rank() == 0)
