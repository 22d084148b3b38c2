"""Checkpoints that older versions have written load, at any number of ranks and any stage."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from keras_world import RANK, SIZE
from old_checkpoints import CASES, drawn, extra, values

import zerohvd.keras as zero

ARCHIVE = Path(__file__).resolve().parents[2] / "data" / "checkpoints-v1" / "keras.tar.xz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(path, filter="data")
    return path


def assert_values(found, expected, *, exact):
    for one, other in zip(found, expected, strict=True):
        if exact:
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", [None, 0, 1, 2])
def test_training_goes_on(folder, name, stage):
    case = CASES[name]
    expected = json.loads((folder / f"{name}.json").read_text())
    same_size = len(expected) == SIZE
    mine = expected[RANK if same_size else 0]
    model, opt = case.build(seed=1, stage=stage)
    found = zero.load(folder / name, model, opt)

    assert {**found, "mean": found["mean"].tolist()} == {**extra(), "mean": [0.0, 1.0, 2.0]}
    if same_size:
        assert drawn() == mine["drawn"]
    assert_values(values(model), mine["saved"], exact=True)
    # Computed by another processor, or another TensorFlow, the last bits differ.
    losses = case.train(model, opt, case.rest, alike=True)
    np.testing.assert_allclose(losses, mine["losses"], rtol=1e-5)
    assert_values(values(model), mine["continued"], exact=False)
