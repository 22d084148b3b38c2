"""`zerohvd plan` for models of a framework, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerohvd import versions
from zerohvd.launching import launch

ROOT = Path(__file__).parents[2]
FRAMEWORKS = [fw for fw in versions.horovod_frameworks() if versions.find(fw)]

TORCH = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50_000, 8192)
        self.blocks = nn.ModuleList(nn.Linear(8192, 8192) for _ in range(100))
        self.head = nn.Linear(8192, 50_000)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def loss(out):
    return nn.functional.cross_entropy(out.flatten(0, 1), out.flatten(0, 1).argmax(1))

def broken():
    raise RuntimeError("no such weights")
"""
KERAS = """
import keras

def Model():
    layers = [keras.layers.Dense(8192) for _ in range(100)]
    return keras.Sequential([keras.Input((8192,)), *layers])
"""


def plan(folder, *arguments):
    code = "import sys; from zerohvd.tools.cli import main; sys.exit(main())"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder),
        "COLUMNS": "160",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return subprocess.run(
        [sys.executable, "-c", code, "plan", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.skipif("torch" not in FRAMEWORKS, reason="needs Horovod for torch")
def test_a_torch_model_larger_than_this_machine_is_planned(tmp_path):
    (tmp_path / "mymodel.py").write_text(TORCH)
    done = plan(
        tmp_path, "mymodel:Model", "--ranks", "8,64", "--memory", "80GB", "--batch", "4x512",
        "--loss", "mymodel:loss", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    psi = 100 * (8192 * 8192 + 8192) + 2 * 50_000 * 8192 + 50_000
    first = found["rows"][0]
    assert first["params"] == pytest.approx(4 * psi, rel=1e-3)
    assert first["optimizer"] == pytest.approx(8 * psi, rel=1e-3)
    # The inputs of 101 linear layers, and the softmax of the output.
    assert first["activations"] == pytest.approx(4 * 2048 * (101 * 8192 + 50_000), rel=0.01)
    assert found["chosen"]["stage"] in (1, 2, 3)
    assert done.stderr == ""


@pytest.mark.skipif("torch" not in FRAMEWORKS, reason="needs Horovod for torch")
def test_models_that_cannot_be_planned_are_errors_without_a_traceback(tmp_path):
    (tmp_path / "mymodel.py").write_text(TORCH)
    done = plan(tmp_path, "mymodel:broken")
    assert done.returncode == 2
    assert "error: mymodel:broken failed (RuntimeError: no such weights)" in done.stderr
    assert "Traceback" not in done.stderr
    done = plan(tmp_path, "mymodel:Model", "--optimizer", "magic")
    assert done.returncode == 2
    assert "optimizer must be one of momentum, " in done.stderr


@pytest.mark.skipif("torch" not in FRAMEWORKS, reason="needs Horovod for torch")
def test_a_measured_network_gives_step_times(tmp_path):
    file = tmp_path / "network.json"
    measure = [sys.executable, "-m", "zerohvd.tools.doctor.bandwidth", "torch", str(file)]
    done = launch(2, measure, timeout=300, env={"PYTHONPATH": str(ROOT)})
    assert done.ok, done.explain()
    done = plan(tmp_path, "--params", "1e8", "--network", str(file), "--json")
    found = json.loads(done.stdout)
    assert "2 ranks on 1 host" in found["network"]["name"]
    assert all(0 < row["seconds"]["least"] <= row["seconds"]["most"] for row in found["rows"])


@pytest.mark.skipif("tensorflow" not in FRAMEWORKS, reason="needs Horovod for TensorFlow")
def test_a_keras_model_larger_than_this_machine_is_planned(tmp_path):
    (tmp_path / "mymodel.py").write_text(KERAS)
    done = plan(tmp_path, "mymodel:Model", "--memory", "1GB", "--batch", "16x8192")
    assert done.returncode == 1, done.stderr
    assert "Sequential, 6,711,705,600 parameters, AdamW: bytes per rank, of 1.0 GB" in done.stdout
    assert "activations: TensorFlow's graph of a step" in done.stdout
    assert "Nothing fits into 1.0 GB per rank" in done.stdout
