"""`zerohvd checkpoint`: inspect, consolidate, verify, diff."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import planned, some_layout, store, values_of

from zerohvd.checkpoint import Content, Entry, Reader, save
from zerohvd.communication.collectives import SingleProcess
from zerohvd.layout import Span
from zerohvd.testing import ThreadWorld
from zerohvd.tools.cli import main


@pytest.fixture
def saved(tmp_path) -> Path:
    ThreadWorld(3).run(lambda c: store(tmp_path / "a", c, some_layout(3), 1))
    return tmp_path / "a"


def test_inspect_shows_parameters_shapes_sizes_and_shards(saved, capsys):
    assert main(["checkpoint", "inspect", str(saved)]) == 0
    out = capsys.readouterr().out
    tensors = Reader.open(saved).tensors
    row = next(line for line in out.splitlines() if "param" in line and "up.weight" in line)
    assert "7 x 53" in row and "float32" in row
    assert row.split()[-1] == str(len(tensors["param/up.weight"].parts))
    assert "saved by 3 ranks" in out and "step 1" in out
    assert main(["checkpoint", "inspect", "--json", str(saved)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tensors"]["param/scale"]["shape"] == [] and told["size"] == 3


def test_consolidate_makes_a_plain_safetensors_file(saved, capsys):
    from safetensors.numpy import load_file

    out = saved.parent / "model.safetensors"
    assert main(["checkpoint", "consolidate", str(saved), str(out)]) == 0
    layout, values = some_layout(1), values_of(some_layout(1), 1)
    loaded = load_file(out)
    assert loaded.keys() == {s.name for s in layout.params}
    for spec in layout.params:
        expected = values[f"param/{spec.name}"].reshape(spec.shape)
        np.testing.assert_array_equal(loaded[spec.name], expected)
    assert [p.name for p in saved.parent.iterdir() if "partial" in p.name] == []


def test_consolidate_refuses_what_it_does_not_know(saved, capsys):
    for out, match in (("model.onnx", "must end with"), ("model.weights.h5", "zerohvd.keras")):
        assert main(["checkpoint", "consolidate", str(saved), str(saved.parent / out)]) == 2
        assert match in capsys.readouterr().err
        assert not (saved.parent / out).exists()


def test_verify_finds_every_damaged_place(saved, capsys):
    assert main(["checkpoint", "verify", str(saved)]) == 0
    reader = Reader.open(saved)
    for key in ("param/embed.weight", "exp_avg/up.bias"):
        part = reader.tensors[key].parts[0]
        file = saved / reader.manifest.files[part.file].name
        data = bytearray(file.read_bytes())
        data[part.offset + 1] ^= 32
        file.write_bytes(data)
    (saved / "shard-00002-of-00003.safetensors").unlink()
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(saved)]) == 1
    said = capsys.readouterr().err
    assert "param/embed.weight" in said and "exp_avg/up.bias" in said
    assert "shard-00002-of-00003.safetensors is missing" in said and "3 problems" in said


def test_diff_looks_at_values_not_at_shards(saved, tmp_path, capsys):
    ThreadWorld(2).run(lambda c: store(tmp_path / "same", c, some_layout(2), 1))
    ThreadWorld(2).run(lambda c: store(tmp_path / "other", c, some_layout(2), 2))
    assert main(["checkpoint", "diff", str(saved), str(tmp_path / "same")]) == 0
    assert "no differences" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(saved), str(tmp_path / "other")]) == 1
    out = capsys.readouterr().out
    assert "step: 1 in the first, 2 in the second" in out
    assert "param/scale: 1 of 1 elements differ" in out


def test_a_missing_checkpoint_is_an_error_without_a_traceback(tmp_path, capsys):
    for action in ("inspect", "verify"):
        assert main(["checkpoint", action, str(tmp_path / "none")]) == 2
        assert "error: there is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["inspect", "verify"])
def test_a_reader_that_has_seen_enough_is_no_error(saved, action):
    command = [sys.executable, "-m", "zerohvd", "checkpoint", action, str(saved)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("suffix", "most"), [(".safetensors", 6 << 20), (".weights.h5", 30 << 20)]
)
def test_consolidate_needs_little_memory(tmp_path, suffix, most):
    """Eight tensors of 24 MB: at most one of them in memory, and of some files not even that."""
    numel = 6_000_000
    entries = [
        Entry("param", f"w{i}", "float32", (numel,), Span(0, numel), np.full(numel, i, np.float32))
        for i in range(8)
    ]
    state = {"weights_h5": {e.name: f"{e.name}/vars/0" for e in entries}, "unplaced": []}
    save(tmp_path / "a", SingleProcess(), planned(lambda: Content("keras", entries, state=state)))
    code = (
        "import h5py, resource, sys\n"
        "from pathlib import Path\n"
        "from zerohvd.checkpoint.offline.consolidate import consolidate\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "consolidate(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    arguments = [str(tmp_path / "a"), str(tmp_path / f"out{suffix}")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    grown = int(done.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert grown < most
