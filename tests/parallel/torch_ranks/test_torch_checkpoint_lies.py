"""A checkpoint or a state_dict that lies about itself is refused, and nothing of it is taken."""

from __future__ import annotations

import contextlib
import copy
import random
from pathlib import Path

import checkpoint_lies
import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn
from training import STAGES, MatrixNet, Net, batch, loss_of, sharded, train

import zerohvd.torch as zero
from zerohvd.checkpoint.offline.consolidate import consolidate
from zerohvd.torch.plugin import weight_files

RANKS = (1, 2)  # hundreds of loads

EVERY = 61  # of some ten thousand lies, per stage


class Small(nn.Module):
    """With a buffer, a scalar and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.head = nn.Linear(3, 11, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(2))
        self.note = {"calls": 0}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.embed(tokens)) * self.scale

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = {"calls": int(state["calls"])}


def fused(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


class Job:
    """All that a load changes."""

    def __init__(self, stage: int, steps: int) -> None:
        self.model, self.opt = sharded(fused, cls=Small, steps=steps, stage=stage)
        self.model.note = {"calls": steps}
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 10)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**steps)
        self.scaler.scale(torch.ones(()))
        for _ in range(steps):
            self.opt.step()
            self.scheduler.step()

    @property
    def helpers(self):
        return {"scheduler": self.scheduler, "scaler": self.scaler}

    def held(self) -> dict[str, object]:
        """Bit by bit; without calls between ranks."""
        inner = self.opt.inner
        return {
            "pieces": [
                (p.detach().clone(), copy.deepcopy(dict(inner.state.get(p, {}))))
                for group in inner.param_groups
                for p in group["params"]
            ],
            "options": [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups],
            "buffers": {n: b.clone() for n, b in self.model.named_buffers()},
            "extra": dict(self.model.note),
            "scheduler": {k: v for k, v in vars(self.scheduler).items() if k in _PLAIN},
            "scheduler's": sorted(vars(self.scheduler)),
            "scaler": self.scaler.state_dict(),
            "generators": [torch.get_rng_state(), random.getstate(), str(np.random.get_state())],
        }


_PLAIN = ("last_epoch", "_step_count", "_last_lr", "base_lrs", "T_max", "eta_min")


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def changed(before: dict[str, object], now: dict[str, object]) -> list[str]:
    return [key for key in before if not same(now[key], before[key])]


def saved(folder: Path, stage: int) -> tuple[Job, Path]:
    job = Job(stage, steps=2)
    zero.save(folder / "good", job.model, job.opt, extra={"epoch": (1, 2)}, **job.helpers)
    return job, folder / "good"


def lie(folder: Path, change) -> Path:
    """A copy of the good checkpoint, its manifest changed and sealed again."""
    path = folder / "lie"
    if hvd.rank() == 0:
        checkpoint_lies.copied(folder / "good", path)
        document = checkpoint_lies.read(path)
        change(document)
        checkpoint_lies.write(path, document)
    hvd.barrier()
    return path


@pytest.mark.skipif(hvd.size() > 1, reason="thousands of loads")
@pytest.mark.parametrize("stage", STAGES)
def test_every_lie_is_refused_or_without_effect(shared_folder, stage):
    right, good = saved(shared_folder, stage)
    right = right.held()
    path = checkpoint_lies.copied(good, shared_folder / "lie")
    victim = Job(stage, steps=1)
    before = victim.held()
    refused = 0
    for told in checkpoint_lies.lies(checkpoint_lies.read(good), every=EVERY, first=stage):
        checkpoint_lies.write(path, told.document)
        try:
            zero.load(path, victim.model, victim.opt, **victim.helpers)
        except zero.CheckpointError as error:
            refused += 1
            assert str(path) in str(error), told.what
            assert changed(before, victim.held()) == [], told.what
        except BaseException as error:
            raise AssertionError(told.what) from error
        else:
            now = victim.held()
            # Numbers in the manifest itself are what it says; tensors are what was saved.
            free = told.what.startswith("values.")
            assert free or same(now["pieces"], right["pieces"]), told.what
            assert same(now["buffers"], right["buffers"]), told.what
            loss_of(victim.model, batch(0, 0)).backward()
            options = told.what.startswith("state.groups")  # some are known by their kernels alone
            with contextlib.suppress(*(TypeError, ValueError, RuntimeError) * options):
                victim.opt.step()
            victim = Job(stage, steps=1)
            before = victim.held()
    assert refused > 100


def shape_of_state(shape):
    def change(document):
        info = document["tensors"]["state.exp_avg/head.weight"]
        info["shape"] = shape

    return change



LIES = {
    "negative": (shape_of_state([-11, -3]), r"shape\[0\] should be a whole number"),
    "transposed": (shape_of_state([3, 11]), r"'exp_avg' of 'head.weight' has shape \(3, 11\)"),
    "flat": (shape_of_state([33]), r"'exp_avg' of 'head.weight' has shape \(33,\)"),
    "scalar": (shape_of_state([]), "should be all 1 elements"),
    "another's": (lambda d: d["tensors"].update(
        {"state.exp_avg/scale": d["tensors"]["state.exp_avg/head.weight"]}),
        "does not hold 'state.exp_avg/scale|'exp_avg' of 'scale' has shape"),
    "gone": (lambda d: d["tensors"].pop("state.exp_avg_sq/head.weight"), "lacks 'exp_avg_sq'"),
    "dtype": (lambda d: d["tensors"]["state.exp_avg/head.weight"].update(dtype="int32"),
              "does not hold 'state.exp_avg/head.weight|holds whole numbers"),
    "step": (lambda d: d["values"]["head.weight"].update(step=["float32", {"!float": "nan"}]),
             "'step' of 'head.weight' should be a finite number"),
    "steps": (lambda d: d["values"]["head.weight"].update(step=["float32", [1, 2]]),
              "step should be a number"),
    "no step": (lambda d: d["values"]["head.weight"].pop("step"), "lacks 'step'"),
    "members": (lambda d: d["state"]["groups"][0]["options"].update(params=[]), "no option"),
    "rng": (lambda d: d["rank_states"][0]["rng"].update(numpy=[]), "generator 'numpy'"),
    "torch rng": (lambda d: d["rank_states"][0]["rng"].update(
        torch=d["rank_states"][0]["rng"]["python"][1]), "generator 'torch'"),
    "scheduler": (lambda d: d["state"]["schedulers"].__setitem__(0, {"optimizer": 1}),
                  "schedulers.0 holds 'optimizer'"),
    "epoch": (lambda d: d["state"]["schedulers"][0].update(last_epoch="x"),
              "schedulers.0.last_epoch should be a number"),
    "scaler": (lambda d: d["state"]["scaler"].pop("growth_factor"), "scaler: KeyError"),
    "scale": (lambda d: d["state"]["scaler"].update(scale={"!float": "nan"}), "scaler.scale"),
    "extra state": (lambda d: d["state"]["modules"].update({"": [1]}), "modules"),
}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_told_to_all_ranks_and_nothing_changes(shared_folder, stage, name):
    change, match = LIES[name]
    saved(shared_folder, stage)
    path = lie(shared_folder, change)
    victim = Job(stage, steps=1)
    before = victim.held()
    with pytest.raises(zero.CheckpointError, match=match):
        zero.load(path, victim.model, victim.opt, **victim.helpers)
    assert changed(before, victim.held()) == []
    zero.load(shared_folder / "good", victim.model, victim.opt, **victim.helpers)
    train(victim.model, victim.opt, steps=1)


@pytest.mark.skipif(hvd.size() > 1, reason="needs no ranks")
def test_consolidating_a_lie_leaves_no_file(shared_folder):
    saved(shared_folder, 2)
    path = checkpoint_lies.copied(shared_folder / "good", shared_folder / "lie")
    out = shared_folder / "out.pt"
    for told in checkpoint_lies.lies(checkpoint_lies.read(path), every=5 * EVERY):
        checkpoint_lies.write(path, told.document)
        try:
            consolidate(path, out, others=weight_files)
            out.unlink()
        except zero.CheckpointError as error:
            assert str(path) in str(error), told.what
        except BaseException as error:
            raise AssertionError(told.what) from error
        assert sorted(p.name for p in shared_folder.iterdir()) == ["good", "lie"], told.what


@pytest.mark.parametrize(("stage", "partition"), [(0, "auto"), (1, "parameter"), (2, "flat")])
@pytest.mark.parametrize(
    "shape", [(1,), (3, 5), (37 * 7,), (1, 1), ()], ids=lambda s: "x".join(map(str, s)) or "scalar"
)
def test_state_of_another_shape_never_reaches_a_kernel(stage, partition, shape):
    model, opt = sharded(fused, cls=Net, stage=stage, partition=partition)
    state = opt.state_dict()
    name = [n for n, p in model.named_parameters() if tuple(p.shape) == (37, 7)]
    index = next(i for i, v in state["state"].items() if v["exp_avg"].shape == (37, 7))
    wrong = copy.deepcopy(state)
    wrong["state"][index]["exp_avg_sq"] = torch.zeros(shape)
    with pytest.raises(ValueError, match=rf"'exp_avg_sq' of '{name[0]}' has shape"):
        opt.load_state_dict(wrong)
    assert same(opt.state_dict()["state"], state["state"])
    opt.load_state_dict(state)
    train(model, opt, steps=1)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("step", torch.tensor(float("nan")), "finite"),
        ("step", torch.zeros(3), "finite"),
        ("step", "x", "finite"),
        ("exp_avg", 3.0, "has float"),
        ("exp_avg", None, "has NoneType"),
        ("exp_avg", torch.zeros(37, 7, dtype=torch.int64), "needs torch.float32"),
        ("surprise", torch.zeros(4), "has shape"),
    ],
)
def test_state_that_is_no_state_is_refused_and_nothing_changes(key, value, match):
    model, opt = sharded(fused, stage=2)
    state = opt.state_dict()
    index = next(i for i, v in state["state"].items() if v["exp_avg"].shape == (37, 7))
    wrong = copy.deepcopy(state)
    wrong["state"][index][key] = value
    with pytest.raises(ValueError, match=match):
        opt.load_state_dict(wrong)
    del wrong["state"][index][key]
    if key != "surprise":
        with pytest.raises(ValueError, match=f"lacks '{key}'"):
            opt.load_state_dict(wrong)
    assert same(opt.state_dict()["state"], state["state"])
    train(model, opt, steps=1)


@pytest.mark.parametrize("stage", [0, 2])
def test_state_of_whole_tensor_optimizers_has_the_shape_they_make(shared_folder, stage):
    def make(params):
        return torch.optim.Adafactor(params, lr=1e-2)

    model, opt = sharded(make, cls=MatrixNet, stage=stage)
    state = opt.state_dict()
    wrong = copy.deepcopy(state)
    index = next(i for i, v in state["state"].items() if "row_var" in v)
    wrong["state"][index]["row_var"] = torch.zeros(1, 5)
    with pytest.raises(ValueError, match=r"'row_var' of 'embed.weight' has shape"):
        opt.load_state_dict(wrong)
    zero.save(shared_folder / "good", model, opt)

    def change(document):
        document["tensors"]["state.row_var/embed.weight"]["shape"] = [11]

    path = lie(shared_folder, change)
    with pytest.raises(zero.CheckpointError, match=r"'row_var' of 'embed.weight' has shape"):
        zero.load(path, model, opt)
    zero.load(shared_folder / "good", model, opt)
    assert same(opt.state_dict()["state"], state["state"])
    train(model, opt, steps=1)
