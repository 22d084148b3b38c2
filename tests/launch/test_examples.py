"""The examples train, and whole Horovod scripts with one line changed train as they did."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from zerohvd.launching import launch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
README = EXAMPLES.parent / "README.md"
DIFFS = sorted((EXAMPLES / "diffs").glob("*.diff"))
SCRIPTS = sorted(set(EXAMPLES.glob("*.py")) - {EXAMPLES / "demo.py", EXAMPLES / "gpt.py"})
# With options that make them short.
TORCH = {
    "recommender_torch": [],
    "torch_amp_accumulate": [],
    "torch_gpt": ["--steps", "8"],
    "torch_resnet": [],
    "torch_stage3_meta": [],
}
KERAS = {
    "horovod_keras_mnist": ["--epochs", "2"],
    "keras_custom_loop": [],
    "keras_fit": ["--epochs", "1"],
    "keras_transformer_stage3": [],
    "recommender_keras": [],
}
if importlib.util.find_spec("transformers") is not None:  # its pinned version needs Python 3.11
    TORCH["huggingface_gpt2"] = []
LINES = 82  # one screen; Horovod's own scripts are longer


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.stem)
def test_an_example_fits_on_a_screen_and_says_how_to_start_it(script):
    source = script.read_text()
    said = ast.get_docstring(ast.parse(source))
    assert re.search(rf"^    horovodrun -np 2 python examples/{script.name}\b", said, re.MULTILINE)
    if script.stem not in ("horovod_imagenet", "horovod_synthetic_benchmark"):
        assert len(source.splitlines()) <= LINES


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The losses that each example prints on two ranks: those of a framework share one launch."""
    found: dict[str, list[float]] = {}
    for scripts in (TORCH, KERAS):
        jobs = [[str(EXAMPLES / f"{name}.py"), *options] for name, options in scripts.items()]
        argv = [word for job in jobs for word in (*job, "--")]
        job = Path(__file__).with_name("examples_job.py")
        folder = tmp_path_factory.mktemp("saved")  # where some of them save
        result = launch(2, [sys.executable, str(job), *argv], timeout=600, cwd=folder)
        assert result.ok, result.explain()
        for part in result.stdout.split("== ")[1:]:
            found[part.split()[0]] = losses_in(part)
    return found


@pytest.mark.parametrize("name", [*TORCH, *KERAS])
def test_an_example_learns_on_two_ranks(name, learned):
    assert learned[name][-1] < 0.99 * max(learned[name])


@pytest.mark.parametrize("which", [0, 1], ids=["torch", "keras"])
def test_the_scripts_of_the_readme_run_on_two_ranks(which, tmp_path):
    fence = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    script = tmp_path / "script.py"
    script.write_text(fence.findall(README.read_text())[which])
    result = launch(2, [sys.executable, str(script)], timeout=240)
    assert result.ok, result.explain()
    assert re.search(r"optimizer +\d+\.\d+ MiB", result.stdout)


def test_an_example_resumes_with_another_number_of_ranks_at_another_stage(tmp_path):
    script, options = EXAMPLES / "resume_other_size.py", ["--checkpoints", str(tmp_path / "two")]
    started = losses(script, *options, "--steps", "10")
    resumed = losses(script, *options, "--steps", "20", "--stage", "3", ranks=3)
    whole = losses(script, "--checkpoints", str(tmp_path / "one"), "--steps", "20")
    assert [*started, *resumed] == pytest.approx(whole, rel=1e-3)


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


def losses(script: Path, *options: str, ranks: int = 2) -> list[float]:
    """Those that a script prints."""
    result = launch(ranks, [sys.executable, str(script), *options], timeout=240)
    assert result.ok, result.explain()
    return losses_in(result.stdout)


def losses_in(text: str) -> list[float]:
    """`loss 2.3`, `loss 2.3 -> 0.1`, or `loss: 2.3` as Keras prints it."""
    found = re.findall(r"loss:? (\d+\.\d+)(?: -> (\d+\.\d+))?", text)
    return [float(number) for numbers in found for number in numbers if number]


@pytest.mark.parametrize("name", ["torch_one_line", "horovod_synthetic_benchmark"])
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
