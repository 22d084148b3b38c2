"""Rank 0 saves alone, at the end of the script."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from zerohvd.launching import launch

JOB = Path(__file__).with_name("saving_job.py")


@pytest.mark.parametrize("stage", [1, 3])
def test_rank_0_saves_after_the_others_have_ended(stage, tmp_path):
    path = tmp_path / "checkpoint.pt"
    result = launch(3, [sys.executable, str(JOB), str(stage), str(path), "saves"], timeout=120)
    assert result.ok, result.explain()
    stored = torch.load(path)
    assert stored["model"]["0.weight"].shape == (9, 7)
    assert stored["opt"]["state"][0]["exp_avg"].shape == (9, 7)


def test_a_rank_that_fails_does_not_stay_for_others(tmp_path):
    started = time.monotonic()
    argv = [sys.executable, str(JOB), "2", str(tmp_path / "checkpoint.pt"), "fails"]
    result = launch(2, argv, timeout=120)
    assert not result.ok
    assert "this rank has had enough" in result.stderr, result.explain()
    assert time.monotonic() - started < 60
