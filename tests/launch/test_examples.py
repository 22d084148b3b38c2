"""Whole Horovod scripts with one line changed train as they did."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from zerohvd.launching import launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIFFS = sorted((EXAMPLES / "diffs").glob("*.diff"))


def before(diff: Path, folder: Path) -> Path:
    """The script as it was, written to a folder."""
    script = EXAMPLES / f"{diff.stem}.py"
    removed, added = changes(diff)
    text = script.read_text()
    assert text.count(added) == 1
    old = folder / script.name
    old.write_text(text.replace(added, removed))
    return old


def changes(diff: Path) -> tuple[str, str]:
    """The line that was, and the line that is."""
    lines = [line for line in diff.read_text().splitlines() if not line.startswith(("---", "+++"))]
    removed = [line[1:] for line in lines if line.startswith("-")]
    added = [line[1:] for line in lines if line.startswith("+")]
    assert (len(removed), len(added)) == (1, 1)
    return removed[0], added[0]


@pytest.mark.parametrize("diff", DIFFS, ids=lambda d: d.stem)
def test_one_line_differs_from_the_horovod_script(diff):
    removed, added = changes(diff)
    assert removed.startswith("import horovod.")
    assert added.startswith("import zerohvd.")
    assert added in (EXAMPLES / f"{diff.stem}.py").read_text().splitlines()


def losses(script: Path, *options: str) -> list[float]:
    result = launch(2, [sys.executable, str(script), *options], timeout=240)
    assert result.ok, result.explain()
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", result.stdout)]


@pytest.mark.parametrize("name", ["horovod_mnist", "horovod_synthetic_benchmark"])
def test_the_changed_script_has_the_losses_of_the_old_one(name, tmp_path):
    expected = losses(before(EXAMPLES / "diffs" / f"{name}.diff", tmp_path))
    assert expected
    assert losses(EXAMPLES / f"{name}.py") == expected


def test_the_imagenet_loop_saves_and_resumes_on_rank_0_alone(tmp_path):
    old = before(EXAMPLES / "diffs" / "horovod_imagenet.diff", tmp_path)
    expected = losses(old, "--checkpoints", str(tmp_path / "old"), "--epochs", "3")
    ours = ["--checkpoints", str(tmp_path / "new")]
    found = losses(EXAMPLES / "horovod_imagenet.py", *ours, "--epochs", "2")
    found += losses(EXAMPLES / "horovod_imagenet.py", *ours, "--epochs", "3")
    # Horovod adds up the gradients of two passes before they travel, stage 2 afterwards.
    assert found == pytest.approx(expected, rel=1e-4)
    # And back: the plain script resumes from what the sharded one has saved.
    resumed = losses(old, "--checkpoints", str(tmp_path / "new"), "--epochs", "4")
    assert len(resumed) == 1
