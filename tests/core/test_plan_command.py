"""`zerohvd plan` for numbers and files; models of a framework are in tests/launch."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from zerohvd.planning.network import Link, Network
from zerohvd.tools.cli import main


@pytest.fixture(autouse=True)
def no_measured_network(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")


def run(capsys, *arguments):
    code = main(["plan", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_papers_numbers_can_be_read_off_the_table(capsys):
    code, out, _ = run(capsys, "--params", "7.5e9", "--ranks", "64", "--precision", "mixed")
    assert code == 0
    rows = [line for line in out.splitlines() if re.search("not measured +>", line)]
    assert len(rows) == 4
    for row, states in zip(rows, ("120.0 GB", "31.4 GB", "16.6 GB", "1.9 GB"), strict=True):
        assert states in row
    assert "activations were not measured: there is no model to run" in out
    assert "Stage 2 on 64 ranks" in out


def test_exit_code_1_when_nothing_fits(capsys):
    code, out, _ = run(capsys, "--params", "1e9", "--layers", 10, "--memory", "1GiB")
    assert code == 1
    assert "Nothing fits into 1.0 GiB per rank" in out
    assert run(capsys, "--params", "1e9", "--memory", "64GiB")[0] == 0


def test_json_has_all_that_the_table_has(capsys):
    code, out, _ = run(
        capsys, "--params", "1e9", "--ranks", "2,8", "--memory", "8GB", "--json", "--bandwidth",
        "25", "--compute", "0.5",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert [(r["ranks"], r["stage"]) for r in found["rows"]] == [
        (n, s) for n in (2, 8) for s in range(4)
    ]
    assert found["rows"][0]["seconds"]["least"] > 0.5
    assert found["network"]["name"] == "25 Gbit/s per rank"
    assert found["chosen"] is not None


def test_a_safetensors_file_is_planned_by_its_names_and_shapes(capsys, tmp_path):
    weights = {f"layers.{i}.weight": np.zeros((64, 64), np.float32) for i in range(4)}
    weights |= {"embed": np.zeros((100, 64), np.float32), "steps": np.zeros(3, np.int64)}
    save_file(weights, tmp_path / "model.safetensors")
    _, out, _ = run(capsys, tmp_path / "model.safetensors", "--ranks", 2, "--json")
    rows = json.loads(out)["rows"]
    trained = 4 * 64 * 64 + 6400
    assert rows[0]["params"] == pytest.approx(4 * trained + 24, rel=1e-3)
    assert rows[0]["optimizer"] == 8 * trained
    assert rows[3]["gathered"] == 4 * (6400 + 2 * 64 * 64)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 20, b"\xff" * 100, b"\x02" + b"\x00" * 7 + b"[]"]
)
def test_a_file_that_is_no_safetensors_is_an_error(capsys, tmp_path, content):
    (tmp_path / "bad.safetensors").write_bytes(content)
    code, _, err = run(capsys, tmp_path / "bad.safetensors")
    assert code == 2
    assert "is no safetensors file" in err
    code, _, err = run(capsys, tmp_path / "missing.safetensors")
    assert code == 2
    assert "cannot be read" in err


def test_a_folder_that_is_no_checkpoint_is_an_error(capsys, tmp_path):
    code, _, err = run(capsys, tmp_path)
    assert code == 2
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give either a model"),
        (("nowhere",), "'nowhere' is neither a checkpoint folder, a .safetensors file nor"),
        (("nowhere_at_all:make",), "'nowhere_at_all' of 'nowhere_at_all:make' cannot be imported"),
        (("json:nothing",), "'json' has no 'nothing'"),
        (("json:__doc__",), "must be a function"),
        (("json:dumps", "--params", "1e9"), "give either a model"),
        (("--params", "1e9", "--batch", "4x4"), "--batch needs a model"),
        (("json:dumps", "--layers", "4"), "--layers goes with --params"),
        (("--params", "1e9", "--network", "/nowhere.json"), "cannot be read"),
        (("--params", "1e9", "--network", "x", "--bandwidth", "3"), "either --network or"),
        (("--params", "1e9", "--bandwidth", "0"), "greater than 0 Gbit/s"),
        (("--params", "1e9", "--optimizer", "magic"), "the optimizer must be one of"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--params", "many"), "expected a number of parameters"),
        (("--params", "1e9", "--ranks", "0"), "expected numbers of ranks"),
        (("--params", "1e9", "--memory", "much"), "expected a size such as 16GiB"),
        (("m:f", "--batch", "4x"), "expected a shape such as 4x1024"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_model_whose_framework_is_not_known_needs_the_option(capsys, monkeypatch, tmp_path):
    (tmp_path / "plain_model.py").write_text("def make():\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    for framework in ("torch", "keras", "tensorflow"):  # as other tests may have imported them
        monkeypatch.delitem(sys.modules, framework, raising=False)
    code, _, err = run(capsys, "plain_model:make")
    assert code == 2
    assert "imports neither torch nor keras: say which one the model is of" in err


def test_a_measured_network_is_used_without_being_named(capsys, tmp_path):
    net = Network(links={"": Link(1e-5, 1e9)}, name="measured here")
    file = tmp_path / "cache" / "zerohvd" / "network.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(net.as_dict()))
    assert "network: measured here; without computation" in run(capsys, "--params", "1e8")[1]


def test_a_plot_is_written(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    assert run(capsys, "--params", "1e9", "--memory", "8GiB", "--plot", file)[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    code, _, err = run(capsys, "--params", "1e9", "--plot", tmp_path / "plan.docx")
    assert code == 2
    assert "cannot be written" in err


def test_a_plot_without_matplotlib_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run(capsys, "--params", "1e9", "--plot", tmp_path / "plan.png")
    assert code == 2
    assert "pip install 'zerohvd[plot]'" in err
