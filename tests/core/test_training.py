"""What adapters share beside steps and states: names, present gradients, monitors, files."""

from __future__ import annotations

import errno
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerohvd.config import ZeroConfig
from zerohvd.errors import DisagreementError
from zerohvd.layout import ParamSpec, build_layout
from zerohvd.testing import ThreadWorld
from zerohvd.training import graph, mapped_file
from zerohvd.training.monitor import check_mode, improvement
from zerohvd.training.naming import group_numbers, groups_bucket_bytes, name_params, unique_names
from zerohvd.training.ownership import OwnerMark, unless_gone
from zerohvd.training.present import agree_on_present
from zerohvd.training.samples import SampleShare, padded


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
        rows = {9: "int32"} if c.rank == 2 else {}
        return agree_on_present(c, [c.rank, 9], rows, weighted=False)

    for present in ThreadWorld(4).run(agree):
        assert present == ({0, 1, 2, 3, 9}, {9: "int32"})
        assert present.expects_rows(9, False) and present.expects_rows(5, True)
        assert not present.expects_rows(5, False) and not present.expects_rows(1, True)


def test_either_all_ranks_count_or_none():
    def agree(c):
        with pytest.raises(DisagreementError, match=r"only ranks \[2\] say"):
            agree_on_present(c, [], {}, weighted=c.rank == 2)
        return True

    assert all(ThreadWorld(3).run(agree))


def test_nan_is_no_improvement():
    def rank(c):
        return [improvement({"loss": float("nan")}, "loss", best, "min", c) for best in (None, 1.0)]

    assert ThreadWorld(2).run(rank) == [[None, None]] * 2


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


def test_names_that_occur_twice_get_numbers():
    assert unique_names(["w", "b", "w", "w"]) == ["w", "b", "w#2", "w#3"]


def test_a_graphs_layout_keeps_tables_and_whole_parameters_in_one_chunk(monkeypatch):
    monkeypatch.setattr(graph, "_CHUNK_BYTES", 1024)
    large, table = ParamSpec("w", (4096,)), ParamSpec("table", (4096,), group="table")
    config = ZeroConfig(stage=2, bucket_bytes=512)

    def chunks(specs, partition="flat", config=config, size=2):
        return len(graph.lay_out(specs, partition, config, size).slots_of[0])

    assert chunks([large]) > 1
    assert chunks([large, table]) == chunks([large], "parameter") == chunks([large], size=1) == 1
    plain = ZeroConfig(stage=0, bucket_bytes=512)
    assert chunks([large], config=plain) == 1
    assert graph.lay_out([large], "flat", plain, 2).size == 1


def test_shards_are_updated_in_parts_of_an_eighth_of_a_bucket(monkeypatch):
    monkeypatch.setattr(graph, "_LEAST_PART_BYTES", 64)
    config = ZeroConfig(stage=2, bucket_bytes=2048)
    layout = graph.lay_out([ParamSpec("w", (512,))], "flat", config, 2)
    parts = graph.updated_pieces(layout, 1, config)
    assert [p.param_span.length for p in parts] == [64] * 4
    assert parts[0].joined(parts[-1]) == next(layout.pieces(1))
    whole = graph.lay_out([ParamSpec("w", (512,))], "parameter", config, 2)
    assert graph.updated_pieces(whole, 0, config) == list(whole.pieces(0))


def test_buckets_go_one_by_one_until_there_is_room():
    layout = build_layout([ParamSpec(f"p{i}", (64,)) for i in range(8)], 2, bucket_bytes=256)
    assert len(layout.buckets) == 8 and graph.buckets_alone(layout) == graph.ROOM
    assert graph.buckets_alone(build_layout([], 2)) == 0


class Owned:
    """Something that an owner can be noted on."""


def test_a_mark_keeps_no_owner_alive_and_survives_pickling():
    mark, marked, owner = OwnerMark("_owner"), Owned(), Owned()
    assert mark.owner_of(marked) is None
    mark.set(marked, owner)
    assert mark.owner_of(marked) is owner
    assert mark.owner_of(pickle.loads(pickle.dumps(marked))) is None
    del owner
    assert mark.owner_of(marked) is None
    mark.set(marked, None)
    assert mark.owner_of(marked) is None


def test_a_call_back_keeps_nothing_alive():
    class Counter:
        calls = 0

        def count(self):
            Counter.calls += 1

    counter = Counter()
    call = unless_gone(counter.count)
    call()
    del counter
    call()
    assert Counter.calls == 1


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 7), st.booleans())
def test_shares_of_samples_differ_by_one_and_ranks_step_alike(samples, ranks, batch, drop_last):
    shares = [SampleShare(samples, ranks, r) for r in range(ranks)]
    assert sum(map(len, shares)) == samples
    assert max(map(len, shares)) == shares[0].largest <= min(map(len, shares)) + 1
    steps = shares[0].most_steps(batch, drop_last=drop_last)
    for share in shares:
        own = len(share) // batch if drop_last else -(-len(share) // batch)
        assert len(list(padded(range(own), steps))) == steps >= own


def test_a_rank_that_is_none_has_no_share():
    with pytest.raises(ValueError, match=r"rank must be in \[0, num_replicas=2\), got 2"):
        SampleShare(10, 2, 2)
