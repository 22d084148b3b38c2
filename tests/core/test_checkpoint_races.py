"""Two jobs want the same name: one has it, the other is told, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from checkpoint_cases import (
    assert_holds,
    content,
    fetch,
    planned,
    refused,
    some_layout,
    store,
    values_of,
)

from zerohvd.checkpoint import CheckpointError, format, save
from zerohvd.checkpoint import writer as writing
from zerohvd.checkpoint.manager.folder import CheckpointFolder, Policy
from zerohvd.checkpoint.writer import claim as claims
from zerohvd.communication.collectives import SingleProcess
from zerohvd.testing import ThreadWorld

HERE = Path(__file__).resolve().parent
TRIES = 100
LAYOUT = some_layout(2)


def elsewhere(path: Path, beats: int = 0) -> None:
    """As a process of another host writes it."""
    holder = claims.Holder("a" * 16, "node17", 4321, "2026-01-02T03:04:05+00:00", "?", "1", beats)
    format.claim_path(path).write_text(json.dumps(holder._asdict()))


def holds(path: Path, version: int) -> None:
    held = ThreadWorld(2).run(lambda c: fetch(path, c, LAYOUT))
    assert_holds(held, values_of(LAYOUT, version))
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_of_two_jobs_that_save_at_once_one_wins_whole_and_the_other_is_told(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "checkpoint_races.py"), str(tmp_path), str(TRIES)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    # They did meet.
    assert told["tries"] == TRIES and told["told"] > TRIES / 10


def test_all_ranks_are_told_who_is_saving(tmp_path, monkeypatch):
    """A job on another host that gives signs of life."""
    monkeypatch.setattr(claims, "_LOOK_SECONDS", 0.01)
    path = tmp_path / "a"
    ThreadWorld(2).run(lambda c: store(path, c, LAYOUT, 1))
    elsewhere(path)
    beat = threading.Timer(0.2, elsewhere, (path, 1))
    beat.start()
    said = refused(2, lambda c: store(path, c, LAYOUT, 2))
    beat.join()
    assert said == (
        f"rank 0: {path} is being saved by another job (process 4321 on node17, since "
        "2026-01-02T03:04:05+00:00): let it finish, or save under another name"
    )
    format.claim_path(path).unlink()
    holds(path, 1)


@pytest.mark.parametrize("text", [None, b"", b"{", b"[]", b'{"id": 1}'])
def test_nobody_waits_for_ever_for_a_dead_job_on_another_host(tmp_path, monkeypatch, text):
    monkeypatch.setattr(claims, "SILENT_SECONDS", 0.3)
    path = tmp_path / "a"
    elsewhere(path)
    if text is not None:
        format.claim_path(path).write_bytes(text)
    format.partial_path(path, "a" * 16).mkdir()
    ThreadWorld(2).run(lambda c: store(path, c, LAYOUT, 2))
    holds(path, 2)


def test_a_job_gives_signs_of_life_while_it_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.02)
    claim = claims.Claim.take(tmp_path / "a", "b" * 16)
    first = claims.holder(tmp_path / "a")
    deadline = threading.Event()
    while claims.holder(tmp_path / "a").beats < 3:
        assert not deadline.wait(0.01)
    assert claims.holder(tmp_path / "a")._replace(beats=0) == first
    claim.release()
    assert not list(tmp_path.iterdir())


def test_a_job_that_was_taken_for_dead_is_told_and_spoils_nothing(tmp_path):
    path = tmp_path / "a"
    made = {}

    def slow(collectives):
        draft, _ = writing.begin(path, collectives, planned(lambda: None))
        made["draft"] = draft
        values = values_of(some_layout(1), 1)
        draft.write(content(some_layout(1), 0, values, 1))

    ThreadWorld(1).run(slow)
    dead = claims.holder(path)._replace(started="long ago")
    format.claim_path(path).write_text(json.dumps(dead._asdict()))
    ThreadWorld(2).run(lambda c: store(path, c, LAYOUT, 2))
    with pytest.raises(CheckpointError, match=rf"{path}"):
        made["draft"].publish()
    made["draft"].discard()
    holds(path, 2)


def test_a_claim_that_was_taken_over_is_noticed_before_anything_is_replaced(tmp_path):
    claim = claims.Claim.take(tmp_path / "a", "b" * 16)
    elsewhere(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"another job took its place: process 4321 on node1"):
        claim.check()
    claim.release()
    assert claims.holder(tmp_path / "a").host == "node17"


def test_an_interrupted_save_can_be_repeated_at_once(tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "a", SingleProcess(), planned(interrupted))
    assert not list(tmp_path.iterdir())


def test_a_manager_leaves_what_another_job_is_writing_in_its_folder(tmp_path):
    elsewhere(tmp_path / "step-5")
    format.partial_path(tmp_path / "step-5", "a" * 16).mkdir()
    format.partial_path(tmp_path / "step-6", "c" * 16).mkdir()
    dead = claims.Claim.take(tmp_path / "step-7", "d" * 16)
    format.claim_path(tmp_path / "step-7").write_text(
        json.dumps(claims.holder(dead.path)._replace(started="long ago")._asdict())
    )
    CheckpointFolder(tmp_path, Policy()).clean()
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["step-5.partial-" + "a" * 16, "step-5.saving"]


def test_an_old_replaced_checkpoint_is_never_taken_for_a_newer_one(tmp_path):
    """Killed while it removed the one before, then killed between the two renames."""
    for version, name in ((1, "f" * 16), (2, "0" * 16)):
        path = tmp_path / f"a.replaced-{name}"
        ThreadWorld(2).run(lambda c, p=path, v=version: store(p, c, LAYOUT, v))
        os.utime(path / "manifest.json", (version, version))
    assert_holds(ThreadWorld(2).run(lambda c: fetch(tmp_path / "a", c, LAYOUT)),
                 values_of(LAYOUT, 2))  # fmt: skip
    ThreadWorld(2).run(lambda c: store(tmp_path / "a", c, LAYOUT, 3))
    holds(tmp_path / "a", 3)


def test_the_old_checkpoint_comes_back_if_the_new_one_cannot_be_moved_in(tmp_path, monkeypatch):
    ThreadWorld(2).run(lambda c: store(tmp_path / "a", c, LAYOUT, 1))
    plain = os.rename

    def rename(source, target):
        if ".partial-" in str(source) and Path(target).name == "a":
            raise OSError(28, "No space left on device")
        plain(source, target)

    monkeypatch.setattr(os, "rename", rename)
    said = refused(2, lambda c: store(tmp_path / "a", c, LAYOUT, 2))
    assert "cannot finish" in said and "No space left" in said
    holds(tmp_path / "a", 1)
