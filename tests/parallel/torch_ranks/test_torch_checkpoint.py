"""A training that is stopped and resumed goes on as if nothing had happened."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from peak_memory import peak_growth
from torch import nn
from training import (
    STAGES,
    MatrixNet,
    Net,
    adamw,
    assert_replicated,
    assert_same,
    batch,
    loss_of,
    make_model,
    sharded,
    train,
)

import zerohvd.torch as zero
from zerohvd.checkpoint import Reader, read_manifest
from zerohvd.checkpoint.writer import Draft


def assert_models_equal(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("partition", ["flat", "parameter"])
def test_training_goes_on_bit_by_bit(shared_folder, stage, partition):
    model, opt = sharded(stage=stage, partition=partition)
    zero.save(shared_folder / "a", model, opt, extra={"epoch": 3, "order": (1, 2)})
    train(model, opt, first=5)

    other, again = sharded(steps=2, stage=stage, partition=partition)
    assert zero.load(shared_folder / "a", other, again) == {"epoch": 3, "order": (1, 2)}
    train(other, again, first=5)
    assert_models_equal(model, other)
    assert_replicated(other)


@pytest.mark.parametrize("before", STAGES)
@pytest.mark.parametrize("after", STAGES)
def test_any_stage_goes_on_where_another_stopped(shared_folder, before, after):
    model, opt = sharded(stage=before, bucket_bytes=900)
    zero.save(shared_folder / "a", model, opt)
    state = opt.state_dict()
    train(model, opt, first=5)
    partition = "flat" if before == after else "parameter"
    other, again = sharded(steps=0, stage=after, bucket_bytes=177, partition=partition)
    zero.load(shared_folder / "a", other, again)
    loaded = again.state_dict()
    assert state["state"].keys() == loaded["state"].keys()
    for index, values in state["state"].items():
        for key, value in values.items():
            assert torch.equal(value, loaded["state"][index][key]), (index, key)
    train(other, again, first=5)
    assert_same(model, other)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_kind_of_state_comes_back(shared_folder, name):
    model, opt = sharded(OPTIMIZERS[name], stage=2)
    zero.save(shared_folder / "a", model, opt)
    train(model, opt, first=5)
    other, again = sharded(OPTIMIZERS[name], steps=0, stage=2, bucket_bytes=333)
    zero.load(shared_folder / "a", other, again)
    train(other, again, first=5)
    assert_same(model, other)


def test_state_of_whole_tensor_optimizers(shared_folder):
    def make(params):
        return torch.optim.Adafactor(params, lr=1e-2)

    model, opt = sharded(make, cls=MatrixNet, stage=2)
    zero.save(shared_folder / "a", model, opt)
    train(model, opt, first=5)
    for stage in STAGES:
        other, again = sharded(make, steps=0, cls=MatrixNet, stage=stage)
        zero.load(shared_folder / "a", other, again)
        train(other, again, first=5)
        assert_same(model, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
def test_16_bit_parameters_and_their_masters(shared_folder, dtype, stage):
    def build(dtype=dtype, **options):
        model = make_model(cls=MatrixNet).to(dtype)
        opt = adamw(model.parameters())
        return zero.zeroify(model, opt, stage=stage, bucket_bytes=600, **options)

    model, opt = build()
    train(model, opt)
    zero.save(shared_folder / "a", model, opt)
    masters = [m.clone() for m in opt.sections[0].masters]
    train(model, opt, first=5)
    other, again = build()
    zero.load(shared_folder / "a", other, again)
    assert all(torch.equal(a, b) for a, b in zip(masters, again.sections[0].masters, strict=True))
    train(other, again, first=5)
    assert_models_equal(model, other)

    # Without masters, and into wide parameters, which are then what the masters were.
    narrow, opt = build(master_dtype=str(dtype).removeprefix("torch."))
    zero.load(shared_folder / "a", narrow, opt)
    train(narrow, opt, first=5)
    wide, opt = build(torch.float32)
    zero.load(shared_folder / "a", wide, opt)
    reader = Reader.open(shared_folder / "a")
    for name, value in wide.state_dict().items():
        _, stored = reader.array(f"master/{name}")
        assert value.cpu().numpy().tobytes() == stored.tobytes(), name
    train(wide, opt, first=5)
    # And back: the masters are the wide parameters.
    zero.save(shared_folder / "wide", wide, opt)
    back, opt = build()
    zero.load(shared_folder / "wide", back, opt)
    loaded = back.state_dict()
    for name, value in wide.state_dict().items():
        assert torch.equal(value.to(dtype), loaded[name]), name


class Noisy(nn.Module):
    """Draws random numbers, and has statistics of its own on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(12, 11)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))

    def forward(self, tokens):
        return self.head(self.drop(self.norm(self.embed(tokens))))


def test_generators_buffers_schedulers_and_scaler_come_back(shared_folder):
    def build():
        model = make_model(cls=Noisy)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        opt = zero.DistributedOptimizer(opt, named_parameters=model.named_parameters(), stage=2)
        schedulers = [
            torch.optim.lr_scheduler.MultiStepLR(opt, [4, 7], gamma=0.5),
            torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.99**s),
        ]
        scaler = zero.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        return model, opt, schedulers, scaler

    def run(model, opt, schedulers, scaler, first):
        drawn = []
        for step in range(first, first + 4):
            opt.zero_grad()
            scaler.scale(loss_of(model, batch(step, hvd.rank()))).backward()
            scaler.step(opt)
            scaler.update()
            for scheduler in schedulers:
                scheduler.step()
            drawn += [random.random(), np.random.rand(), torch.rand(()).item()]
        return drawn, opt.param_groups[0]["lr"], scaler.get_scale()

    torch.manual_seed(100 + hvd.rank())
    np.random.seed(hvd.rank())
    random.seed(hvd.rank())
    one = build()
    torch.manual_seed(200 + hvd.rank())
    run(*one, 0)
    model, opt, schedulers, scaler = one
    zero.save(shared_folder / "a", model, opt, scheduler=schedulers, scaler=scaler, step=4)
    expected = run(*one, 4)

    two = build()
    zero.load(shared_folder / "a", two[0], two[1], scheduler=two[2], scaler=two[3])
    assert run(*two, 4) == expected
    assert_models_equal(model, two[0])
    assert read_manifest(shared_folder / "a")[1].step == 4
    if hvd.size() > 1:
        mean = hvd.allgather(model.norm.running_mean[None], name="means")
        assert not torch.equal(mean[0], mean[1])


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_in_progress_goes_on(shared_folder, stage):
    def build(stage=stage):
        model = make_model()
        opt = adamw(model.parameters())
        options = {"backward_passes_per_step": 3, "bucket_bytes": 600}
        return zero.zeroify(model, opt, stage=stage, **options)

    def passes(model, opt, first, stop):
        for micro in range(first, stop):
            loss_of(model, batch(micro, hvd.rank())).backward()
            if micro % 3 == 2:
                opt.step()
                opt.zero_grad()

    model, opt = build()
    passes(model, opt, 0, 5)  # in the middle of the second step
    zero.save(shared_folder / "a", model, opt)
    passes(model, opt, 5, 9)
    other, again = build()
    zero.load(shared_folder / "a", other, again)
    passes(other, again, 5, 9)
    assert_models_equal(model, other)
    for after in STAGES:
        other, again = build(after)
        zero.load(shared_folder / "a", other, again)
        passes(other, again, 5, 9)
        assert_same(model, other, exact=False)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_no_sync_are_kept(shared_folder, stage):
    model, opt = sharded(stage=stage)
    opt.zero_grad()
    with opt.no_sync():
        loss_of(model, batch(5, hvd.rank())).backward()
    zero.save(shared_folder / "a", model, opt)
    other, again = sharded(steps=0, stage=stage)
    zero.load(shared_folder / "a", other, again)
    for m, o in ((model, opt), (other, again)):
        loss_of(m, batch(6, hvd.rank())).backward()
        o.step()
    assert_models_equal(model, other)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_and_unfrozen_parameters(shared_folder, stage):
    def build(more=0.0):
        model = make_model(cls=MatrixNet)
        with torch.no_grad():
            model.embed.weight.add_(more)
        model.embed.requires_grad_(False)
        return zero.zeroify(model, adamw(model.parameters()), stage=stage)

    model, opt = build(1.0)
    train(model, opt)
    zero.save(shared_folder / "a", model, opt)
    other, again = build()
    zero.load(shared_folder / "a", other, again)
    assert_models_equal(model, other)
    for m, o in ((model, opt), (other, again)):
        m.embed.requires_grad_(True)
        train(m, o, first=5)
    assert_models_equal(model, other)
    # Another optimizer that never froze it.
    third, opt = sharded(steps=0, cls=MatrixNet)
    zero.load(shared_folder / "a", third, opt)


def test_the_model_alone(shared_folder):
    model, _opt = sharded(stage=2)
    zero.save(shared_folder / "a", model)
    other, again = sharded(steps=0, stage=1)
    before = len(again.inner.state)
    assert zero.load(shared_folder / "a", other) is None
    assert_models_equal(model, other)
    assert len(again.inner.state) == before
    bare = Net()
    zero.load(shared_folder / "a", bare)
    assert_models_equal(model, bare)


def test_extra_may_hold_tensors_arrays_and_odd_keys(shared_folder):
    model, opt = sharded(steps=1)
    extra = {
        "tensor": torch.arange(6).view(2, 3).to(torch.bfloat16),
        "array": np.linspace(0, 1, 7),
        3: {"nested": [None, True, float("inf"), b"bytes", {1, 2}]},
    }
    zero.save(shared_folder / "a", model, opt, extra)
    back = zero.load(shared_folder / "a", model, opt)
    assert torch.equal(back["tensor"], extra["tensor"]) and back[3] == extra[3]
    np.testing.assert_array_equal(back["array"], extra["array"])
    with pytest.raises(TypeError, match="sampler is a DataLoader"):
        loader = torch.utils.data.DataLoader([1])
        zero.save(shared_folder / "b", model, opt, {"sampler": loader})
    hvd.barrier()  # the first rank clears up after the others have gone on
    assert not list(shared_folder.glob("b*"))


# -- mistakes and damage ---------------------------------------------------------------------------


def unchanged(model, opt, act, error, match):
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    state = opt.state_dict()
    with pytest.raises(error, match=match) as caught:
        act()
    said = hvd.allgather_object(str(caught.value))
    assert len(set(said)) == 1, said
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    for index, values in opt.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(value, state["state"][index][key])


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest"])
def test_damage_is_reported_by_all_ranks_and_nothing_is_loaded(shared_folder, damage):
    model, opt = sharded()
    zero.save(shared_folder / "a", model, opt)
    train(model, opt)
    file = sorted((shared_folder / "a").glob("shard-*"))[-1]
    if damage == "manifest":
        file = shared_folder / "a" / "manifest.json"
    hvd.barrier()
    if hvd.rank() == 0:
        data = bytearray(file.read_bytes())
        if damage == "cut":
            del data[-5:]
        else:
            data[-20] ^= 4
        file.unlink()
        if damage != "missing":
            file.write_bytes(data)
    hvd.barrier()
    unchanged(
        model, opt, lambda: zero.load(shared_folder / "a", model, opt), zero.CheckpointError,
        file.name,
    )  # fmt: skip
    train(model, opt)  # and goes on


def test_a_checkpoint_of_another_model_is_refused(shared_folder):
    model, opt = sharded()
    zero.save(shared_folder / "a", model, opt)
    other, again = sharded(cls=MatrixNet)
    unchanged(
        other, again, lambda: zero.load(shared_folder / "a", other, again), ValueError,
        "checkpoint has .* that the model lacks|model has .* that the checkpoint lacks",
    )  # fmt: skip
    bare = Net()
    bare.up = nn.Linear(7, 38)
    with pytest.raises(ValueError, match=r"up.weight. has shape"):
        zero.load(shared_folder / "a", bare)
    model.up = nn.Linear(7, 37)
    with pytest.raises(ValueError, match=r"up.weight. that is not the model's any more"):
        zero.save(shared_folder / "b", model, opt)


def test_what_cannot_be_stored_is_told_before_anything_is_written(shared_folder, monkeypatch):
    model, opt = sharded()
    written = []
    monkeypatch.setattr(Draft, "write", lambda self, content: written.append(content))
    for extra, match in [
        ({"sampler": object()}, r"state\.extra\.sampler is a object"),
        ({"names": np.array(["a"])}, r"state\.extra\.names is an array of <U1"),
    ]:
        with pytest.raises(TypeError, match=match):
            zero.save(shared_folder / "a", model, opt, extra=extra)
    hvd.barrier()
    assert not written and not list(shared_folder.iterdir())


def test_ranks_that_save_to_different_paths_are_told(shared_folder):
    if hvd.size() == 1:
        return
    model, opt = sharded()
    with pytest.raises(zero.CheckpointError, match=r"rank 1: .*rank 0 has made it for .*at-0\b"):
        zero.save(shared_folder / f"at-{hvd.rank()}", model, opt)
    hvd.barrier()
    assert not list(shared_folder.iterdir())


def test_there_is_no_checkpoint(shared_folder):
    model, opt = sharded()
    unchanged(
        model, opt, lambda: zero.load(shared_folder / "none", model, opt), zero.CheckpointError,
        "there is no checkpoint",
    )  # fmt: skip


def test_a_save_on_one_rank_only_is_an_error_not_a_hang(shared_folder):
    if hvd.size() == 1:
        return
    model, opt = sharded()
    with pytest.raises(zero.DisagreementError, match=r"some ranks called .*zero.save\(\)"):
        if hvd.rank() == 0:
            zero.save(shared_folder / "a", model, opt)
        else:
            train(model, opt)
    opt.close()


def test_a_step_that_is_complete_must_be_made_first(shared_folder):
    model, opt = sharded()
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(RuntimeError, match=r"call opt.step\(\) before"):
        zero.save(shared_folder / "a", model, opt)
    opt.step()
    zero.save(shared_folder / "a", model, opt)


def test_wrong_arguments():
    model = make_model()
    with pytest.raises(TypeError, match=r"zero.DistributedOptimizer"):
        zero.save("a", model, adamw(model.parameters()))
    with pytest.raises(TypeError, match=r"torch.nn.Module"):
        zero.load("a", {})


def test_a_disk_that_is_full_on_one_rank(shared_folder, monkeypatch):
    import errno
    import os

    model, opt = sharded()
    zero.save(shared_folder / "a", model, opt)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    train(model, opt)
    if hvd.rank() == hvd.size() - 1:
        monkeypatch.setattr(
            os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full"))
        )
    with pytest.raises(zero.CheckpointError, match=r"shard-.*disk full"):
        zero.save(shared_folder / "a", model, opt)
    monkeypatch.undo()
    hvd.barrier()  # the first rank clears up after the others have gone on
    assert [p.name for p in shared_folder.iterdir()] == ["a"]
    zero.load(shared_folder / "a", model, opt)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


# -- plain files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_plain_files_of_weights(shared_folder, stage):
    from safetensors.torch import save_file

    source = make_model(seed=7)
    if hvd.rank() == 0:
        torch.save(source.state_dict(), shared_folder / "plain.pt")
        torch.save({"state_dict": source.state_dict(), "epoch": 1}, shared_folder / "inside.pth")
        plain = {k: v for k, v in source.state_dict().items() if k != "head.weight"}
        save_file(plain, shared_folder / "plain.safetensors")
    hvd.barrier()
    for name in ("plain.pt", "inside.pth", "plain.safetensors"):
        model, opt = sharded(stage=stage)
        zero.load(shared_folder / name, model, opt)
        assert_models_equal(model, source)
        train(model, opt)
        assert_replicated(model)
    if hvd.rank() == 0:
        Path(shared_folder / "broken.pt").write_bytes(b"PK\x03\x04 not a zip")
    hvd.barrier()
    with pytest.raises(zero.CheckpointError, match=r"broken.pt"):
        zero.load(shared_folder / "broken.pt", model, opt)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_consolidated_weights_are_plain_files(shared_folder, suffix):
    from safetensors.torch import load_file

    from zerohvd.tools.cli import main

    model, opt = sharded(stage=2)
    zero.save(shared_folder / "a", model, opt)
    out = shared_folder / f"model.{suffix}"
    if hvd.rank() == 0:
        assert main(["checkpoint", "consolidate", str(shared_folder / "a"), str(out)]) == 0
    hvd.barrier()
    if suffix == "pt":
        loaded = torch.load(out, weights_only=True, mmap=True)
        plain = Net()
        plain.load_state_dict(loaded)
        assert_models_equal(model, plain)
        assert all(t.data_ptr() % 16 == 0 for t in loaded.values() if t.numel())
    else:
        loaded = load_file(out)
        for name, value in loaded.items():
            assert torch.equal(value, model.state_dict()[name])
    other, again = sharded(steps=0, stage=1)
    zero.load(out, other, again)
    assert_models_equal(model, other)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_keeps_the_newest_and_the_best(shared_folder, asynchronous):
    model, opt = sharded(steps=0)
    losses = {2: 0.5, 4: 0.1, 6: 0.3, 8: 0.4}
    weights = {}
    with zero.CheckpointManager(
        shared_folder / "ckpt", keep=2, every=2, asynchronous=asynchronous
    ) as manager:
        assert manager.restore(model, opt) is None
        for step in range(1, 9):
            train(model, opt, steps=1, first=step)
            manager.step(step, model, opt, extra={"step": step}, metric=losses.get(step))
            weights[step] = {k: v.clone() for k, v in model.state_dict().items()}
    hvd.barrier()
    names = sorted(p.name for p in (shared_folder / "ckpt").iterdir())
    assert names == ["step-4", "step-6", "step-8"]
    assert manager.latest.name == "step-8" and manager.best.name == "step-4"
    hvd.barrier()
    for which, step in (("latest", 8), ("best", 4), (6, 6)):
        other, again = sharded(steps=0, stage=1)
        assert manager.restore(other, again, which=which) == {"step": step}
        for name, value in other.state_dict().items():
            assert torch.equal(value, weights[step][name])


def test_errors_of_asynchronous_saves_surface_on_all_ranks(shared_folder, monkeypatch):
    import errno
    import os

    model, opt = sharded()
    manager = zero.CheckpointManager(shared_folder, asynchronous=True)
    manager.save(1, model, opt)
    manager.wait()
    if hvd.rank() == hvd.size() - 1:
        monkeypatch.setattr(
            os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full"))
        )
    manager.save(2, model, opt)
    train(model, opt, first=5)
    with pytest.raises(zero.CheckpointError, match=r"shard-.*disk full"):
        manager.save(3, model, opt)
    monkeypatch.undo()
    manager.save(3, model, opt)
    manager.close()
    hvd.barrier()
    assert sorted(p.name for p in shared_folder.iterdir()) == ["step-1", "step-3"]


def test_saving_over_and_over_leaves_one_checkpoint(shared_folder):
    model, opt = sharded()
    for _ in range(3):
        train(model, opt, steps=1)
        zero.save(shared_folder / "a", model, opt)
    hvd.barrier()
    assert [p.name for p in shared_folder.iterdir()] == ["a"]
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(shared_folder / "a")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("trained", [False, True])
def test_loading_takes_memory_for_the_own_shards_and_a_buffer(shared_folder, stage, trained):
    if hvd.size() > 2:
        return  # as many bytes on more ranks: nothing new, but time

    def build():
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(10)))
        return zero.zeroify(model, adamw(model.parameters()), stage=stage, bucket_bytes=1 << 22)

    def step(model, opt):
        opt.zero_grad()
        model(torch.ones(1, 1024)).sum().backward()
        opt.step()
        opt.zero_grad()

    model, opt = build()
    step(model, opt)
    zero.save(shared_folder / "a", model, opt)
    if not trained:
        del model, opt  # before: what is freed while the load runs would hide what it takes
        model, opt = build()
    own = 3 * 4 * 10 * 1024 * 1024 // hvd.size()  # parameters and two moments
    grown = peak_growth(lambda: zero.load(shared_folder / "a", model, opt))
    assert own // 2 < grown < own + (12 << 20), (grown / 2**20, own / 2**20)
