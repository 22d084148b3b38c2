"""Optimizer state and masters elsewhere."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from training import MatrixNet, adamw, assert_same, sharded, train

import zerohvd.torch as zero


class Half(MatrixNet):
    def __init__(self):
        super().__init__()
        self.to(torch.bfloat16)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("cls", [MatrixNet, Half])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloading_changes_no_result(where, cls, stage, tmp_path):
    path = {"path": tmp_path / "offload"} if where == "disk" else {}
    expected, _ = sharded(cls=cls, stage=stage)
    model, opt = sharded(cls=cls, stage=stage, offload=where, **path)
    assert_same(expected, model, exact=True)
    if where == "disk":
        report = zero.memory_report(opt)
        assert report["master"] == 0
        assert report["optimizer"] <= 8 * len(opt.inner.state)  # step counters
        assert not list((tmp_path / "offload").iterdir()), "files have no names to leave behind"


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_state_goes_both_ways(stage, tmp_path):
    model, opt = sharded(cls=MatrixNet, stage=stage, offload="disk", path=tmp_path)
    other, again = sharded(cls=MatrixNet, stage=stage, steps=0, offload="disk", path=tmp_path)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(opt.state_dict())
    assert zero.memory_report(again)["optimizer"] <= 8 * len(again.inner.state)
    train(model, opt, first=5)
    train(other, again, first=5)
    assert_same(model, other, exact=True)


@pytest.mark.parametrize("cls", [MatrixNet, Half])
@pytest.mark.parametrize("trained", [False, True])
def test_checkpoints_are_loaded_into_files(cls, trained, tmp_path, shared_folder, monkeypatch):
    """Where state does not fit into memory, a load must not hold it there either."""
    options = {"cls": cls, "stage": 3, "offload": "disk", "path": tmp_path}
    model, opt = sharded(**options)
    zero.save(shared_folder / "a", model, opt)
    other, again = sharded(steps=2 if trained else 0, **options)
    files = []
    plain = again.offload.scratch
    monkeypatch.setattr(again.offload, "scratch", lambda *a: files.append(a) or plain(*a))
    zero.load(shared_folder / "a", other, again)
    assert len(files) >= 3 * len(again.inner.state)  # a parameter or master, and two moments
    assert zero.memory_report(again)["optimizer"] <= 8 * len(again.inner.state)
    train(model, opt, first=5)
    train(other, again, first=5)
    assert_same(model, other, exact=True)


def test_only_pieces_of_one_section_are_updated_at_a_time(tmp_path, monkeypatch):
    seen = []
    step = torch.optim.AdamW.step

    def watched(self, *args):
        pieces = [p for g in self.param_groups for p in g["params"]]
        seen.append(sum(p.grad is not None for p in pieces))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    _, opt = sharded(
        adamw, cls=MatrixNet, stage=3, steps=1, offload="disk", path=tmp_path, partition="flat"
    )
    assert seen == [len(s.owned) for s in opt.sections]
    assert len(seen) > 1 or hvd.size() == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offload": "disk"}, "needs path"),
        ({"offload": "gpu"}, '"cpu", "disk"'),
        ({"path": "/tmp"}, "goes with"),
        ({"offload": "cpu", "path": "/tmp"}, "goes with"),
    ],
)
def test_options_that_make_no_sense(options, says):
    with pytest.raises(ValueError, match=says):
        sharded(stage=2, steps=0, **options)
