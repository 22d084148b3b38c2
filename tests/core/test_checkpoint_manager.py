"""A folder of checkpoints: which stay, and what happens beside the training."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoint_cases import (
    content,
    fetch,
    fill_the_disk,
    planned,
    refused,
    some_layout,
    values_of,
)

from zerohvd.checkpoint import writer as writing
from zerohvd.checkpoint.manager.folder import CheckpointFolder, Policy, checkpoints
from zerohvd.communication.collectives import SingleProcess
from zerohvd.testing import ThreadWorld

LAYOUT = some_layout(2)


def make(rank, version, metric=None):
    made = content(LAYOUT, rank, values_of(LAYOUT, version), version)
    made.state = {"metric": metric}
    return made


def run(folder, steps, metrics=None, **options):
    """Two ranks save at `steps`."""

    def rank(collectives):
        policy = Policy(**{k: v for k, v in options.items() if k != "asynchronous"})
        manager = CheckpointFolder(folder, policy, asynchronous=options.get("asynchronous", False))
        for step in steps:
            metric = metrics[step] if metrics else None
            manager.save(
                step, collectives, planned(lambda s=step, m=metric: make(collectives.rank, s, m))
            )
        manager.wait(collectives)
        return manager

    return ThreadWorld(2).run(rank)[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_and_the_best_stay(tmp_path, asynchronous):
    metrics = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3, 5: float("nan"), 10: 0.2}
    manager = run(tmp_path, metrics, metrics, keep=2, asynchronous=asynchronous)
    assert list(checkpoints(tmp_path)) == [2, 5, 10]
    assert manager.latest() == tmp_path / "step-10"
    assert manager.best() == tmp_path / "step-2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-2", "step-5"]
    fetch(tmp_path / "step-2", SingleProcess(), some_layout(1))


def test_higher_can_be_better(tmp_path):
    metrics = {1: 0.5, 2: 0.9, 3: 0.4}
    assert run(tmp_path, metrics, metrics, keep=1, mode="max").best() == tmp_path / "step-2"
    assert list(checkpoints(tmp_path)) == [2, 3]


def test_all_stay_if_asked(tmp_path):
    run(tmp_path, range(1, 6), keep=None)
    assert list(checkpoints(tmp_path)) == [1, 2, 3, 4, 5]


def test_due():
    assert [s for s in range(7) if Policy(every=3).due(s)] == [3, 6]
    assert all(Policy().due(s) for s in range(3))
    for wrong in ({"keep": 0}, {"every": 0}, {"keep": 1.5}, {"mode": "low"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Policy(**wrong)


def test_saving_beside_the_training_returns_before_the_disk_is_done(tmp_path, monkeypatch):
    gate = threading.Event()
    plain = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (gate.wait(10), plain(fd)))
    ranks = SingleProcess()
    layout = some_layout(1)
    manager = CheckpointFolder(tmp_path, Policy(), asynchronous=True)
    values = values_of(layout, 1)
    manager.save(1, ranks, planned(lambda: content(layout, 0, values, 1)))
    for value in values.values():
        value.fill(0)  # the training goes on
    assert manager.latest() is None
    gate.set()
    manager.wait(ranks)
    expected = values_of(layout, 1)
    for key, parts in fetch(tmp_path / "step-1", ranks, layout).items():
        for span, data in parts:
            assert data.tolist() == expected[key][slice(*span)].tolist()


def test_a_checkpoint_is_complete_without_another_call(tmp_path):
    ranks = SingleProcess()
    manager = CheckpointFolder(tmp_path, Policy(), asynchronous=True)
    layout = some_layout(1)
    manager.save(1, ranks, planned(lambda: content(layout, 0, values_of(layout, 1), 1)))
    deadline = time.monotonic() + 20
    while manager.latest() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    manager.wait(ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_errors_of_the_thread_surface_on_all_ranks(tmp_path, monkeypatch, rank, capfd):
    run(tmp_path, [1])
    fill_the_disk(monkeypatch, rank)

    def train(collectives):
        manager = CheckpointFolder(tmp_path, Policy(), asynchronous=True)
        manager.save(2, collectives, planned(lambda: make(collectives.rank, 2)))
        try:
            manager.wait(collectives)
        finally:
            manager.wait(collectives)  # said once

    said = refused(2, train)
    assert f"rank {rank}: " in said and "No space left" in said
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert "was not saved" in capfd.readouterr().err


def test_one_save_is_under_way_at_most(tmp_path, monkeypatch):
    running, most = [0], [0]
    plain = writing.Draft.write

    def write(self, planned):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        plain(self, planned)
        running[0] -= 1

    monkeypatch.setattr(writing.Draft, "write", write)
    ranks = SingleProcess()
    layout = some_layout(1)
    manager = CheckpointFolder(tmp_path, Policy(keep=None), asynchronous=True)
    for step in range(1, 6):
        plan = planned(lambda s=step: content(layout, 0, values_of(layout, s), s))
        manager.save(step, ranks, plan)
    manager.wait(ranks)
    assert most[0] == 1 and list(checkpoints(tmp_path)) == [1, 2, 3, 4, 5]


def test_a_save_under_way_is_no_leftover_to_another_manager(tmp_path, monkeypatch):
    """Two managers of one folder: one for every step, say, and one for the best."""
    ranks, go = SingleProcess(), threading.Event()
    plain = writing.Draft.write

    def write(self, planned):
        assert self.path.name != "step-1" or go.wait(20)
        return plain(self, planned)

    monkeypatch.setattr(writing.Draft, "write", write)
    layout = some_layout(1)
    made = planned(lambda: content(layout, 0, values_of(layout, 1), 1))
    first = CheckpointFolder(tmp_path, Policy(), asynchronous=True)
    first.save(1, ranks, made)
    second = CheckpointFolder(tmp_path, Policy())
    second.clean()
    second.save(2, ranks, made)
    go.set()
    first.wait(ranks)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_leftovers_of_killed_saves_are_removed(tmp_path):
    run(tmp_path, [1])
    for name in ("step-2.partial-", "step-1.replaced-", "other.partial-"):
        (tmp_path / f"{name}{'0' * 16}").mkdir()
    CheckpointFolder(tmp_path, Policy()).clean()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.partial-" + "0" * 16, "step-1"]


def test_a_replaced_checkpoint_without_successor_is_kept(tmp_path):
    run(tmp_path, [1])
    (tmp_path / "step-1").rename(tmp_path / f"step-1.replaced-{'0' * 16}")
    manager = CheckpointFolder(tmp_path, Policy())
    manager.clean()
    assert manager.latest() == tmp_path / "step-1"
    fetch(manager.latest(), SingleProcess(), some_layout(1))


def test_a_script_that_just_ends_gets_its_last_checkpoint(tmp_path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from checkpoint_cases import content, planned, some_layout, values_of\n"
        "from zerohvd.checkpoint.manager.folder import CheckpointFolder, Policy\n"
        "from zerohvd.communication.collectives import SingleProcess\n"
        "layout = some_layout(1, scale=20_000)\n"
        "plan = planned(lambda: content(layout, 0, values_of(layout, 1), 1))\n"
        "folder = CheckpointFolder(Path(sys.argv[1]), Policy(), asynchronous=True)\n"
        "folder.save(1, SingleProcess(), plan)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent, check=True,
        timeout=60,
    )  # fmt: skip
    assert list(checkpoints(tmp_path)) == [1]
