"""What adapters share beside steps and states: names, present gradients, monitors, files."""

from __future__ import annotations

import errno
import os

import pytest

from zerohvd.errors import DisagreementError
from zerohvd.testing import ThreadWorld
from zerohvd.training import mapped_file
from zerohvd.training.monitor import check_mode, improvement
from zerohvd.training.naming import group_numbers, groups_bucket_bytes, name_params
from zerohvd.training.present import agree_on_present, check_present


def test_names_come_from_the_model_in_its_order():
    groups = [["p2"], [("given", "p0")], ["p1"]]
    assert name_params(groups, None) == {"p2": "group0.0", "p0": "given", "p1": "group2.0"}
    assert name_params(groups, None, first_group=3)["p1"] == "group5.0"
    model = [("a", "p0"), ("b", "p1"), ("tied", "p1"), ("other", "p9"), ("c", "p2")]
    assert list(name_params(groups, model).items()) == [("p0", "a"), ("p1", "b"), ("p2", "c")]


@pytest.mark.parametrize(
    ("named", "match"),
    [
        ([("a", "p0")], "1 that are not among them"),
        ([("a", "p0"), ("a", "p1")], "twice"),
        (["p0"], "pairs"),
    ],
)
def test_names_that_do_not_do(named, match):
    with pytest.raises(ValueError, match=match):
        name_params([["p0", "p1"]], named)


def test_groups_are_numbers_or_lists():
    def is_param(member):
        return isinstance(member, str)

    assert group_numbers([["a"], ["b", "c"]], is_param) == {"a": 1, "b": 2, "c": 2}
    assert group_numbers(None, is_param) == group_numbers(3, is_param) == {}
    for wrong, match in (([["a"], ["a"]], "two groups"), ([[1]], "tensors"), (-1, "at least 0")):
        with pytest.raises(ValueError, match=match):
            group_numbers(wrong, is_param)
    assert [groups_bucket_bytes(g, 10) for g in (None, 0, [["a"]], 3, 100)] == [
        None,
        None,
        None,
        4,
        1,
    ]


def test_a_gradient_on_any_rank_is_present_on_all():
    def agree(c):
        return agree_on_present(c, [c.rank, 9], weighted=False)

    assert ThreadWorld(4).run(agree) == [{0, 1, 2, 3, 9}] * 4
    check_present([1], {0, 1}, ["a", "b"])
    with pytest.raises(ValueError, match=r"\['b'\] came after a first step"):
        check_present([0, 1], {0}, ["a", "b"])


def test_either_all_ranks_count_or_none():
    def agree(c):
        with pytest.raises(DisagreementError, match=r"only ranks \[2\] say"):
            agree_on_present(c, [], weighted=c.rank == 2)
        return True

    assert all(ThreadWorld(3).run(agree))


def test_all_ranks_take_rank_0s_word_for_an_improvement():
    def watch(c):
        logs = {"loss": 1.0 + c.rank, "accuracy": 0.5 - c.rank}
        return [
            improvement(logs, "loss", best, mode, c)
            for best, mode in ((None, "min"), (1.5, "min"), (0.5, "min"), (0.5, "max"))
        ]

    assert ThreadWorld(3).run(watch) == [[1.0, 1.0, None, 1.0]] * 3
    with pytest.raises(ValueError, match=r"monitors 'val_loss', but the metrics are \['loss'\]"):
        improvement({"loss": 1.0}, "val_loss", None, "min", None)
    assert check_mode("max") == "max"
    with pytest.raises(ValueError, match="mode"):
        check_mode("best")


def test_a_mapped_file_has_no_name(tmp_path):
    mapping = mapped_file.map_unnamed(tmp_path, 5000, "state")
    mapping[4999] = 7
    assert len(mapping) == 5000 and mapping[4999] == 7 and mapping[0] == 0
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_said_at_once(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"cannot reserve 8 bytes for state in .*No space left"):
        mapped_file.map_unnamed(tmp_path, 8, "state")
    assert os.listdir(tmp_path) == []
