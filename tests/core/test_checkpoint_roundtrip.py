"""What one number of ranks has written, any other number reads."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import assert_holds, fetch, planned, some_layout, store, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import layouts, spec_lists

from zerohvd.checkpoint import (
    CheckpointError,
    Content,
    CorruptCheckpointError,
    Entry,
    Reader,
    Want,
    open_safetensors,
    read_manifest,
    save,
    share_out,
)
from zerohvd.communication.collectives import SingleProcess
from zerohvd.layout import Span
from zerohvd.testing import ThreadWorld


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_layout_reads_what_any_other_has_written(data):
    specs = data.draw(spec_lists(max_params=6))
    old, new = data.draw(layouts(specs)), data.draw(layouts(specs))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step-1")
        ThreadWorld(old.size).run(lambda c: store(path, c, old, 1))
        parts = ThreadWorld(new.size).run(lambda c: fetch(path, c, new))
        assert_holds(parts, values_of(new, 1))


def test_each_rank_writes_one_safetensors_file_that_others_can_read(tmp_path):
    from safetensors import safe_open

    layout = some_layout(3)
    ThreadWorld(3).run(lambda c: store(tmp_path / "a", c, layout, 1))
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == [
        "manifest.json",
        *(f"shard-{r:05d}-of-00003.safetensors" for r in range(3)),
    ]
    expected = values_of(layout, 1)
    for file in files[1:]:
        with safe_open(tmp_path / "a" / file, "np") as shard:
            for key in shard.keys():  # noqa: SIM118
                name, _, span = key.rpartition("[")
                start, stop = map(int, span[:-1].split(":"))
                np.testing.assert_array_equal(shard.get_tensor(key), expected[name][start:stop])


def test_no_element_is_written_twice(tmp_path):
    layout = some_layout(4)
    ThreadWorld(4).run(lambda c: store(tmp_path / "a", c, layout, 1))
    _, manifest = read_manifest(tmp_path / "a")
    data = sum(f.nbytes - f.header_bytes for f in manifest.files)
    assert data == manifest.nbytes == sum(v.nbytes for v in values_of(layout, 1).values())


def test_a_rank_reads_the_chunks_it_needs_and_no_others(tmp_path, monkeypatch):
    layout = some_layout(1, scale=30_000)
    store(tmp_path / "a", SingleProcess(), layout, 1)
    seen = []
    plain = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, b, at: seen.append(len(b[0])) or plain(fd, b, at)
    )
    reader = Reader.open(tmp_path / "a")
    half = Span(0, 100_000)
    into = np.zeros(100_000, np.float32)
    want = Want("param/embed.weight", half, memoryview(into).cast("B"))
    reader.read([want])
    np.testing.assert_array_equal(into, values_of(layout, 1)["param/embed.weight"][:100_000])
    # The header, and the chunk that holds the bytes.
    assert sum(seen) == reader.manifest.files[0].header_bytes + (1 << 20)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_byte_is_read_twice(tmp_path, monkeypatch, size):
    """Three ranks saved; however many load, each reads its ranges once, and whole chunks."""
    old, new = (some_layout(n, scale=5_000, bucket_bytes=1 << 40) for n in (3, size))
    ThreadWorld(3).run(lambda c: store(tmp_path / "a", c, old, 1))
    seen: dict[tuple, int] = {}
    plain = os.preadv

    def count(fd, buffers, at):
        key = (threading.get_ident(), os.readlink(f"/proc/self/fd/{fd}"), at)
        seen[key] = seen.get(key, 0) + 1
        done = plain(fd, buffers, at)
        read[0] += done
        return done

    read = [0]
    monkeypatch.setattr(os, "preadv", count)
    parts = ThreadWorld(size).run(lambda c: fetch(tmp_path / "a", c, new))
    monkeypatch.undo()
    assert_holds(parts, values_of(new, 1))
    assert set(seen.values()) == {1}
    _, manifest = read_manifest(tmp_path / "a")
    pieces = sum(len(data) for part in parts for data in part.values())
    headers = size * sum(f.header_bytes for f in manifest.files)
    # Where a range of one rank begins inside a chunk, two ranks read that chunk.
    edges = 0 if size in (1, 3) else 2 * pieces * (1 << 20)
    assert manifest.nbytes <= read[0] <= manifest.nbytes + headers + edges


def test_damage_is_noticed_before_it_arrives_anywhere_that_takes_blocks(tmp_path):
    layout = some_layout(1, scale=30_000)
    store(tmp_path / "a", SingleProcess(), layout, 1)
    reader = Reader.open(tmp_path / "a")
    info = reader.tensors["param/embed.weight"]
    part = info.parts[0]
    with (tmp_path / "a" / reader.manifest.files[0].name).open("r+b") as file:
        file.seek(part.offset + (2 << 20) + 5)
        file.write(b"\0\1\2\3")
    taken = []
    want = Want(info.key, Span(10, info.numel), lambda start, block: taken.append(start))
    with pytest.raises(CorruptCheckpointError, match=r"is damaged in 'param/embed\.weight'"):
        reader.read([want])
    assert taken == [0, (1 << 18) - 10]


def test_values_and_states_come_back(tmp_path):
    layout = some_layout(2)
    ThreadWorld(2).run(lambda c: store(tmp_path / "a", c, layout, 7))
    _, manifest = read_manifest(tmp_path / "a")
    assert manifest.step == 7 and manifest.size == 2 and manifest.framework == "numpy"
    assert manifest.state == {"version": 7}
    assert manifest.rank_states == ({"rank": 0}, {"rank": 1})
    assert manifest.values == {s.name: {"step": 7} for s in layout.params}


@given(
    st.lists(st.tuples(st.integers(0, 70_000), st.sampled_from(["float64", "uint8"])), max_size=6),
    st.integers(1, 7),
    st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_what_all_ranks_hold_is_shared_out_byte_by_byte(lengths, size, uncut):
    entries = [
        Entry("param", f"p{i}", dtype, (n,), Span(0, n), np.arange(n).astype(dtype))
        for i, (n, dtype) in enumerate(lengths)
    ]
    shares = [share_out(entries, rank, size, uncut=uncut) for rank in range(size)]
    found: dict[str, list] = {e.name: [] for e in entries}
    for share in shares:
        for e in share:
            found[e.name].append((e.span, bytes(e.read())))
    for e in entries:
        parts = sorted(found[e.name])
        assert b"".join(data for _, data in parts) == bytes(e.read())
        assert parts[0][0].start == 0 and parts[-1][0].stop == e.span.stop
        assert not uncut or len(parts) == 1


def test_the_shares_of_large_tensors_are_equal():
    n = 1_000_000
    one = [Entry("param", "p", "float32", (n,), Span(0, n), np.zeros(n, np.float32))]
    sizes = [sum(e.nbytes for e in share_out(one, rank, 3)) for rank in range(3)]
    assert max(sizes) - min(sizes) <= 8


def test_plain_safetensors_are_a_source_like_any_other(tmp_path):
    from safetensors.numpy import save_file

    expected = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "s": np.float64(3)[None]}
    save_file(expected, tmp_path / "plain.safetensors")
    reader = open_safetensors(tmp_path / "plain.safetensors")
    assert reader.tensors["param/w"].shape == (3, 4)
    into = np.zeros(5, np.float32)
    wants = [Want("param/w", Span(2, 7), memoryview(into).cast("B"))]
    reader.read(wants)
    assert into.tolist() == [2, 3, 4, 5, 6]


def test_blocks_can_be_taken_as_they_come(tmp_path):
    layout = some_layout(3, scale=30_000)
    ThreadWorld(3).run(lambda c: store(tmp_path / "a", c, layout, 1))
    reader = Reader.open(tmp_path / "a")
    expected = values_of(layout, 1)["exp_avg/embed.weight"]
    into = np.zeros_like(expected)
    largest = 0

    def take(start, block):
        nonlocal largest
        largest = max(largest, len(block))
        part = np.frombuffer(block, np.float32)
        into[start : start + part.size] = part

    reader.read([Want("exp_avg/embed.weight", Span(0, expected.size), take)])
    np.testing.assert_array_equal(into, expected)
    assert largest <= 1 << 20


def test_overwriting_replaces_the_old_checkpoint_and_leaves_nothing_behind(tmp_path):
    layout = some_layout(2)
    for version in (1, 2):
        ThreadWorld(2).run(lambda c, v=version: store(tmp_path / "a", c, layout, v))
    assert_holds(ThreadWorld(2).run(lambda c: fetch(tmp_path / "a", c, layout)),
                 values_of(layout, 2))  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("…")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        ThreadWorld(2).run(lambda c: store(tmp_path / "thesis", c, some_layout(2), 1))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis"]


def test_ranks_that_write_the_same_or_leave_something_out_get_an_error(tmp_path):
    zeros = np.zeros(4, np.float32)

    def make(rank, span):
        return Content("numpy", [Entry("param", "w", "float32", (8,), span, zeros)])

    for spans, match in [
        ((Span(0, 4), Span(0, 4)), "more than one rank"),
        ((Span(0, 4), Span(5, 8)), "should have 12 bytes"),
        ((Span(0, 3), Span(4, 8)), "should have"),
    ]:
        with pytest.raises((ValueError, CheckpointError), match=match):
            ThreadWorld(2).run(
                lambda c, s=spans: save(tmp_path / "a", c, planned(lambda: make(c.rank, s[c.rank])))
            )
        assert not list(tmp_path.iterdir())


def test_loading_needs_one_buffer_beside_the_memory_it_fills(tmp_path):
    """A rank of four loads its quarter of 96 MB, checked, into memory that is there already."""
    numel = 24_000_000
    data = np.arange(numel, dtype=np.float32)
    entry = Entry("param", "w", "float32", (numel,), Span(0, numel), data)
    save(tmp_path / "a", SingleProcess(), planned(lambda: Content("numpy", [entry])))
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from zerohvd.checkpoint import Reader, Want\n"
        "from zerohvd.layout import Span\n"
        "into = np.ones(6_000_000, np.float32)\n"
        "span = Span(12_000_000, 18_000_000)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "reader = Reader.open(Path(sys.argv[1]))\n"
        "wants = [Want('param/w', span, memoryview(into).cast('B'))]\n"
        "reader.read(wants)\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "assert (into == np.arange(*span, dtype=np.float32)).all()\n"
        "print(grown)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert int(done.stdout) * 1024 < 6 << 20
