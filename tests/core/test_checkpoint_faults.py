"""Nothing is lost when processes are killed, and no damage goes unnoticed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import (
    assert_holds,
    content,
    fetch,
    fill_the_disk,
    planned,
    refused,
    some_layout,
    store,
    values_of,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from zerohvd.checkpoint import CheckpointError, CorruptCheckpointError, Reader, format, save
from zerohvd.checkpoint import writer as writing
from zerohvd.checkpoint.offline.compare import differences
from zerohvd.checkpoint.offline.consolidate import consolidate
from zerohvd.testing import ThreadWorld

HERE = Path(__file__).resolve().parent
KILLS = 120
LAYOUT = some_layout(2)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Two saves of the same model."""
    folder = tmp_path_factory.mktemp("sound")
    for name, version in (("a", 1), ("b", 2)):
        ThreadWorld(2).run(lambda c, n=name, v=version: store(folder / n, c, LAYOUT, v))
    return folder


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "a").iterdir())


def expect_refusal(path: Path, match: str, ranks: int = 2) -> None:
    """Every rank raises the same error, which names the file."""
    layout = some_layout(ranks)
    assert match in refused(ranks, lambda c: fetch(path, c, layout))


@settings(
    max_examples=600,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.integers(0, 2), st.floats(0, 1, exclude_max=True), st.integers(0, 8), st.integers(1, 3))
@example(0, 0.0, 0, 1)
@example(1, 0.0, 8, 2)
def test_every_corruption_is_reported_on_every_rank(sound, tmp_path_factory, which, at, how, ranks):
    path = tmp_path_factory.mktemp("broken") / "a"
    shutil.copytree(sound / "a", path)
    file = path / files(sound)[which]
    data = bytearray(file.read_bytes())
    position = int(at * len(data))
    if how < 8:
        data[position] ^= 1 << how
    else:
        del data[position:]
    file.write_bytes(data)
    try:
        expect_refusal(path, file.name, ranks)
        assert any(file.name in problem for problem in problems(path))
    finally:
        shutil.rmtree(path.parent)


def problems(path: Path) -> list[str]:
    try:
        return list(Reader.open(path).check_all())
    except CheckpointError as error:
        return [str(error)]


@pytest.mark.parametrize("which", range(3))
def test_a_missing_file_is_named(sound, tmp_path, which):
    shutil.copytree(sound / "a", tmp_path / "a")
    name = files(sound)[which]
    (tmp_path / "a" / name).unlink()
    expect_refusal(tmp_path / "a", name)


def test_a_file_of_another_save_is_named(sound, tmp_path):
    shutil.copytree(sound / "a", tmp_path / "a")
    name = files(sound)[1]
    shutil.copy(sound / "b" / name, tmp_path / "a" / name)
    expect_refusal(tmp_path / "a", "belongs to another save")
    for act in (
        lambda: consolidate(tmp_path / "a", tmp_path / "out.safetensors"),
        lambda: list(differences(Reader.open(tmp_path / "a"), Reader.open(sound / "a"))),
    ):
        with pytest.raises(CorruptCheckpointError, match="belongs to another save"):
            act()
    assert not (tmp_path / "out.safetensors").exists()


def test_a_manifest_of_another_version_says_what_to_do(sound, tmp_path):
    shutil.copytree(sound / "a", tmp_path / "a")
    manifest = tmp_path / "a" / "manifest.json"
    document = json.loads(manifest.read_bytes())
    del document["checksum"]
    manifest.write_bytes(format.seal({**document, "version": 2}))
    expect_refusal(tmp_path / "a", "format version 2; this zerohvd reads version 1")


def test_bytes_behind_the_end_are_noticed(sound, tmp_path):
    shutil.copytree(sound / "a", tmp_path / "a")
    name = files(sound)[2]
    with (tmp_path / "a" / name).open("ab") as file:
        file.write(b"more")
    expect_refusal(tmp_path / "a", "too long")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_is_an_error_on_all_ranks_and_the_old_checkpoint_stays(
    sound, tmp_path, monkeypatch, rank
):
    shutil.copytree(sound / "a", tmp_path / "a")
    fill_the_disk(monkeypatch, rank)
    said = refused(2, lambda c: store(tmp_path / "a", c, LAYOUT, 3))
    assert f"rank {rank}: " in said and "No space left" in said and "shard-" in said
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert_holds(ThreadWorld(2).run(lambda c: fetch(tmp_path / "a", c, LAYOUT)),
                 values_of(LAYOUT, 1))  # fmt: skip


def test_an_empty_path_is_refused_and_a_relative_one_means_where_it_was_said(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="path of a checkpoint is empty"):
        format.absolute("")
    monkeypatch.chdir(tmp_path)
    said = format.absolute(Path("a b", "ü"))
    monkeypatch.chdir("/")
    ThreadWorld(2).run(lambda c: store(said, c, LAYOUT, 1))
    assert Reader.open(tmp_path / "a b" / "ü").manifest.step == 1


def test_a_path_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/a\.partial.*Not a directory"):
        ThreadWorld(2).run(lambda c: store(tmp_path / "file" / "a", c, LAYOUT, 1))


def test_an_error_while_collecting_the_state_reaches_all_ranks(tmp_path):
    def make(rank):
        if rank == 1:
            raise TypeError("extra.sampler cannot be stored")
        return content(LAYOUT, rank, values_of(LAYOUT, 1), 1)

    said = []

    def attempt(collectives):
        try:
            save(tmp_path / "a", collectives, planned(lambda: make(collectives.rank)))
        except TypeError as error:
            said.append(str(error))

    ThreadWorld(2).run(attempt)
    assert said == ["rank 1: extra.sampler cannot be stored"] * 2
    assert not list(tmp_path.iterdir())


def test_unfinished_checkpoints_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(writing.Draft, "publish", lambda self: os.kill)
    ThreadWorld(2).run(lambda c: store(tmp_path / "a", c, LAYOUT, 1))
    left, claim = sorted(tmp_path.iterdir())
    assert claim == format.claim_path(tmp_path / "a")
    assert format.leftover(left) == ("a", "partial")
    with pytest.raises(CheckpointError, match="never finished"):
        Reader.open(tmp_path / "a")
    with pytest.raises(CheckpointError, match="unfinished checkpoint"):
        Reader.open(left)


def test_the_old_checkpoint_is_found_between_the_two_renames(sound, tmp_path):
    shutil.copytree(sound / "a", tmp_path / f"a.replaced-{'0' * 16}")
    shutil.copytree(sound / "b", tmp_path / f"a.partial-{'0' * 16}")
    assert_holds(ThreadWorld(2).run(lambda c: fetch(tmp_path / "a", c, LAYOUT)),
                 values_of(LAYOUT, 1))  # fmt: skip


def test_a_folder_of_checkpoints_is_not_one(sound):
    with pytest.raises(CheckpointError, match="holds some: a, b"):
        Reader.open(sound)


def test_a_damaged_optimizer_state_does_not_keep_anyone_from_the_weights(sound, tmp_path):
    shutil.copytree(sound / "a", tmp_path / "a")
    reader = Reader.open(tmp_path / "a")
    part = reader.tensors["exp_avg/up.weight"].parts[0]
    file = tmp_path / "a" / reader.manifest.files[part.file].name
    data = bytearray(file.read_bytes())
    data[part.offset] ^= 1
    file.write_bytes(data)
    reader.array("param/up.weight")
    with pytest.raises(CorruptCheckpointError, match="damaged in 'exp_avg"):
        reader.array("exp_avg/up.weight")
    assert len(list(reader.check_all())) == 1


def test_kills_at_random_moments_lose_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "checkpoint_kills.py"), str(tmp_path), str(KILLS)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["kills"] == KILLS
    # The moments were spread over all there is to hit.
    assert told["unfinished"] > KILLS / 20 and told["versions"] > KILLS / 20
    np.testing.assert_equal(told["lost"], 0)


def test_long_words_between_ranks_arrive_whole():
    from zerohvd.checkpoint import together

    def speak(collectives):
        said = "x" * (5000 * collectives.rank)
        return together(collectives, "test", lambda: said)[1]

    for heard in ThreadWorld(3).run(speak):
        assert [len(h) for h in heard] == [0, 5000, 10000]


def whole(path: Path, version: int) -> None:
    held = ThreadWorld(2).run(lambda c: fetch(path, c, LAYOUT))
    assert_holds(held, values_of(LAYOUT, version))


@pytest.mark.parametrize("what", ["open", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_file_system_that_refuses_is_named_on_all_ranks_and_the_old_checkpoint_stays(
    sound, tmp_path, monkeypatch, what, code
):
    """Read-only, no permission, no quota: wherever it shows first."""
    shutil.copytree(sound / "a", tmp_path / "a")
    plain = getattr(os, what)
    writes = os.O_WRONLY | os.O_RDWR

    def refuse(target, *arguments, **options):
        if what != "open" or (arguments and arguments[0] & writes):
            raise OSError(code, os.strerror(code), target if what != "fsync" else None)
        return plain(target, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, what, refuse)
        said = refused(2, lambda c: store(tmp_path / "a", c, LAYOUT, 3))
    assert os.strerror(code) in said and str(tmp_path / "a") in said
    whole(tmp_path / "a", 1)
    ThreadWorld(2).run(lambda c: store(tmp_path / "a", c, LAYOUT, 4))
    whole(tmp_path / "a", 4)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_may_not_write_stops_all(sound, tmp_path, monkeypatch, rank):
    shutil.copytree(sound / "a", tmp_path / "a")
    plain = os.open

    def refuse(path, flags, *arguments, **options):
        if f"shard-{rank:05d}" in str(path) and flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return plain(path, flags, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        said = refused(2, lambda c: store(tmp_path / "a", c, LAYOUT, 3))
    assert f"rank {rank}: cannot write" in said and "Permission denied" in said
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    whole(tmp_path / "a", 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_may_not_read_stops_all(sound, tmp_path, monkeypatch, rank):
    plain = os.open

    def refuse(path, flags, *arguments, **options):
        if f"shard-{rank:05d}" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return plain(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    said = refused(2, lambda c: fetch(sound / "a", c, LAYOUT))
    assert f"shard-{rank:05d}" in said and "Permission denied" in said


def test_a_path_that_is_a_file_is_not_overwritten(tmp_path):
    (tmp_path / "a").write_text("mine")
    said = refused(2, lambda c: store(tmp_path / "a", c, LAYOUT, 1))
    assert "exists and is not a checkpoint" in said
    assert (tmp_path / "a").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    assert "is a file" in refused(2, lambda c: fetch(tmp_path / "a", c, LAYOUT))


def test_a_link_is_followed_and_stays_a_link(sound, tmp_path):
    shutil.copytree(sound / "a", tmp_path / "real" / "step-1")
    for name in ("latest", "dangling"):
        target = tmp_path / "real" / ("step-1" if name == "latest" else "step-2")
        (tmp_path / name).symlink_to(target, target_is_directory=True)
        ThreadWorld(2).run(lambda c, n=name: store(tmp_path / n, c, LAYOUT, 5))
        assert (tmp_path / name).is_symlink()
        whole(tmp_path / name, 5)
        whole(target, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dangling", "latest", "real"]
    assert sorted(p.name for p in (tmp_path / "real").iterdir()) == ["step-1", "step-2"]


@pytest.mark.parametrize("name", ["ünïcödé 检查点", "a b", "-rf", "a.partial", "50%", "\udcff"])
def test_names_of_any_kind(tmp_path, name):
    path = format.absolute(f"{tmp_path}/{name}/")
    assert path == tmp_path / name
    for version in (1, 2):
        ThreadWorld(2).run(lambda c, v=version: store(path, c, LAYOUT, v))
        whole(path, version)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 250])
def test_names_that_no_file_system_has_are_refused_in_words(tmp_path, name):
    said = refused(2, lambda c: store(tmp_path / name, c, LAYOUT, 1))
    assert "rank 0: cannot make" in said and str(tmp_path) in said
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) in refused(2, lambda c: fetch(tmp_path / name, c, LAYOUT))
