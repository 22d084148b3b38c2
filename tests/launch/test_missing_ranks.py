"""A rank does not come: the others wait for a limited time, then say for whom and for what."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from saying import heard

from zerohvd.launching import launch

HERE = Path(__file__).parent
LIMIT = 6  # seconds; ranks that start on a busy machine are seconds apart


def run(job, ranks, *argv):
    env = {"ZEROHVD_TIMEOUT": str(LIMIT), "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
    result = launch(ranks, [sys.executable, str(HERE / job), *map(str, argv)], timeout=240, env=env)
    assert not result.timed_out, result.explain()
    return result


def test_torch_waits_for_a_limited_time_at_every_stage_and_in_every_call(tmp_path):
    faults = ("0step", "1step", "1save", "2step", "3step", "3save", "3build")
    result = run("missing_torch_job.py", 2, tmp_path, *faults)
    said = dict(line.split(": ", 1) for line in heard(tmp_path))
    assert list(said) == [*(f"stage {f[0]} {f[1:]}" for f in faults), "again"], result.explain()
    where = {"step": "(step\\(\\)|forward or backward pass)", "save": r"zero\.save\(\)"}
    for what, text in said.items():
        if what == "again":
            assert "an earlier call that has failed" in text
            continue
        assert f"rank 0 has waited {LIMIT} s for rank 1" in text
        assert re.search(where.get(what.split()[-1], "the start of training"), text), text
        assert "See the output of rank 1" in text
        assert "ZEROHVD_TIMEOUT" in text
        assert LIMIT <= int(text.split()[0]) < LIMIT + 15, text
    assert "Missing ranks:" in result.stderr  # Horovod's warning, in time


def test_of_three_torch_ranks_both_that_wait_say_so(tmp_path):
    result = run("missing_torch_job.py", 3, tmp_path, "2step")
    for rank in (0, 1):
        said = f"rank {rank} has waited {LIMIT} s for other ranks in backward() or step()"
        assert any(said in line for line in heard(tmp_path)), result.explain()
        # Some time before, on its stderr: a warning, with the parameter and who is missing.
        warned = f"zerohvd: rank {rank} has waited 1 s for other ranks in backward() or step()"
        assert warned in result.stderr, result.stderr
    missing = r"Missing: rank 2 \(.+?\) waits for nothing, after 1 steps"
    assert all(re.search(missing, line) for line in heard(tmp_path)), heard(tmp_path)
    assert re.search(rf"{missing}.+In flight as well: the gradients of '1\.", result.stderr)
    assert re.search(r"^2: \[.*zero0", result.stderr, re.MULTILINE), result.stderr


@pytest.mark.parametrize(
    ("how", "stage", "what"),
    [
        ("elsewhere", 1, "the gradients of 'sequential.dense_1.bias'"),
        ("evaluates", 0, "in model.fit()"),
        ("own loop", 2, ""),
        ("predicts", 3, "in model.predict()"),
    ],
)
def test_keras_waits_for_a_limited_time(how, stage, what, tmp_path):
    result = run("missing_keras_job.py", 2, how, stage, tmp_path)
    told = [line for line in heard(tmp_path) if line.startswith("rank 0: ")]
    assert told, result.explain()
    assert re.match(r"rank 0: \d+ s: WaitTimeoutError: ", told[0])
    assert "rank 0 waits in vain" in told[0]
    assert what in told[0]
    assert f"because rank 1 ended, or did not come within {LIMIT} s" in told[0]
    if how == "elsewhere":  # a warning some time before
        said = r"rank 0 has waited \d s for rank 1: step 4 of model\.fit\(\)\. Missing: rank"
        assert re.search(said, result.stderr), result.stderr
    assert "ZEROHVD_TIMEOUT" in told[0]
    assert re.search(r"^1!?: \[", result.stderr, re.MULTILINE), result.stderr


def test_keras_ranks_with_other_numbers_of_steps_are_told_at_once(tmp_path):
    """Before `fit` begins where they know them, otherwise when the first rank is through."""
    result = run("missing_keras_job.py", 2, "counts", 2, tmp_path)
    said = "\n".join(heard(tmp_path))
    assert said.count("at once: model.fit() would run a different number of") == 8, result.explain()
    assert "batches per epoch: 4 on rank 0, 2 on rank 1" in said
    assert "epochs: 1 on rank 0, 2 on rank 1" in said
    told = r"^rank {}: \d+ s: DisagreementError: rank {} {}.*equally many batches"
    for rank, words in ((0, "trains while another rank"), (1, "has ended an epoch")):
        assert re.search(told.format(rank, rank, words), said, re.MULTILINE), result.explain()


def test_a_rank_that_evaluates_predicts_or_saves_alone_at_stage_3_is_told_at_once(tmp_path):
    result = run("missing_keras_job.py", 2, "alone", 3, tmp_path)
    said = [line for line in heard(tmp_path) if line.startswith("at once: ")]
    assert len(said) == 10, result.explain()
    for words in (
        "rank 0 model.predict() at stage 3, rank 1 model.evaluate() at stage 3",
        "model.evaluate() would run a different number of batches per epoch: 2 on rank 0, 1 on",
    ):
        assert sum(words in line for line in said) == 2, said
    assert sum("rank 0 model.fit()" in line for line in said) == 2, said
    assert sum("is sharded over the ranks" in line for line in said) == 2, said
    assert sum("zero.save_model(model, path) on all ranks" in line for line in said) == 2, said
