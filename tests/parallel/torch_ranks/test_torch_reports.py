"""Memory and traffic, to the byte."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from training import STAGES, adamw, batch, loss_of, make_model, sharded

import zerohvd.torch as zero

WIDTH = 256  # large enough that padding and scalars are far below one percent


class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.body = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


class Wide(nn.Module):
    """Shards of a quarter of a megabyte and more, of up to four ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 512)
        self.body = nn.Sequential(*[nn.Linear(512, 512) for _ in range(2)])
        self.head = nn.Linear(512, 11)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def large_shards(section):
    return [s for s in section.reducer.shards if s.numel() * s.element_size() >= 1 << 18]


def params_of(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_memory_between_steps_is_the_table_of_the_stages(stage):
    model, opt = sharded(cls=Big, stage=stage, bucket_bytes=300_000)
    psi, n = params_of(model), hvd.size()
    report = zero.memory_report(opt)
    assert report["params"] == pytest.approx(4 * psi / (n if stage == 3 else 1), rel=0.01)
    assert report["grads"] == pytest.approx(4 * psi / (n if stage >= 2 else 1), rel=0.01)
    assert report["optimizer"] == pytest.approx(8 * psi / (n if stage else 1), rel=0.01)
    assert report["master"] == 0
    assert report["buffers"] == 0
    keys = ("params", "grads", "optimizer", "master", "buffers")
    assert report["total"] == sum(report[k] for k in keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_are_counted(dtype):
    class Half(Big):
        def __init__(self):
            super().__init__()
            self.to(dtype)

    model, opt = sharded(cls=Half, stage=2)
    psi, n = params_of(model), hvd.size()
    report = zero.memory_report(opt)
    assert report["params"] == pytest.approx(2 * psi, rel=0.01)
    assert report["master"] == pytest.approx(4 * psi / n, rel=0.01)
    assert report["optimizer"] == pytest.approx(8 * psi / n, rel=0.01)


@pytest.mark.parametrize("stage", [2, 3])
def test_reduced_gradients_have_the_same_memory_in_every_step(stage):
    if stage == 2 and hvd.size() == 2:
        pytest.skip("what has been received becomes the shard")
    model, opt = sharded(cls=Wide, stage=stage, steps=0, bucket_bytes=1 << 22)
    places = []
    for step in range(4):
        loss_of(model, batch(step, hvd.rank())).backward()
        opt.step()
        places.append([shard.data_ptr() for s in opt.sections for shard in large_shards(s)])
        opt.zero_grad()
        assert zero.memory_report(opt)["grads"] == 0
    assert places[0]
    assert all(place == places[0] for place in places)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_a_user_has_kept_stay_as_they_are(stage):
    model, opt = sharded(cls=Wide, stage=stage, steps=0, bucket_bytes=1 << 22)
    loss_of(model, batch(0, hvd.rank())).backward()
    opt.synchronize()
    pieces = [p for group in opt.param_groups for p in group["params"]]
    kept = [p.grad for p in pieces if p.grad is not None]
    copies = [g.clone() for g in kept]
    assert any(g.any() for g in kept)
    with opt.skip_synchronize():
        opt.step()
    for step in (1, 2):
        opt.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        opt.step()
    assert all(torch.equal(g, copy) for g, copy in zip(kept, copies, strict=True))


@pytest.mark.parametrize("bucket_bytes", [100_000, 300_000])
def test_stage_2_never_holds_more_than_two_buckets_of_full_gradients(bucket_bytes):
    model = make_model(cls=Big)
    opt = zero.DistributedOptimizer(
        adamw(model.parameters()), model.named_parameters(), stage=2, bucket_bytes=bucket_bytes
    )
    largest = max(bucket_bytes, max(4 * p.numel() for p in model.parameters()))
    peaks = []

    def bytes_of(grad):
        return 0 if grad is None else grad.untyped_storage().nbytes()

    def note(_):
        full = sum(bytes_of(p.grad) for p in model.parameters())
        peaks.append((full, zero.memory_report(opt)["grads"]))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(note)
    for step in range(2):
        loss_of(model, batch(step, hvd.rank())).backward()
        assert all(bytes_of(p.grad) <= 4 for p in model.parameters())
        opt.step()
    shards = 4 * params_of(model) / hvd.size()
    assert max(full for full, _ in peaks) <= largest
    assert max(held for _, held in peaks) <= 1.01 * shards + 2 * largest


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_moves_one_reducescatter_and_one_allgather_of_everything(stage):
    model, opt = sharded(cls=Big, stage=stage, bucket_bytes=200_000)
    n, layout = hvd.size(), opt.sections[0].layout
    report = zero.communication_report(opt)
    if n == 1:
        assert report["total"].bytes == 0
        return
    padded = 4 * (params_of(model) + layout.padding)
    assert report["reducescatter"].bytes == padded * (n - 1) // n
    assert report["allgather"].bytes == padded * (n - 1) // n
    assert report["reducescatter"].calls == report["allgather"].calls == len(layout.buckets)
    agreed = report["total"].bytes - report["reducescatter"].bytes - report["allgather"].bytes
    assert agreed <= 200
    assert set(report) == {"reducescatter", "allgather", "allreduce", "total"}
    assert layout.padding < 0.001 * params_of(model) + 64 * len(layout.buckets) * n


def test_traffic_of_whole_parameters_is_the_same_over_all_ranks():
    model, opt = sharded(cls=Big, stage=2, partition="parameter")
    n = hvd.size()
    moved = zero.communication_report(opt)
    names = ("reducescatter", "allgather")
    mine = torch.tensor([moved[k].bytes if n > 1 else 0 for k in names])
    total = hvd.allreduce(mine, op=hvd.Sum, name="moved")
    assert total.tolist() == [4 * params_of(model) * (n - 1)] * 2


def test_the_report_is_of_the_latest_step():
    _, opt = sharded(cls=Big, stage=2, steps=3)
    three = zero.communication_report(opt)
    _, opt = sharded(cls=Big, stage=2, steps=1)
    assert dict(three) == dict(zero.communication_report(opt))


def test_reports_want_a_sharded_optimizer():
    with pytest.raises(TypeError, match="DistributedOptimizer"):
        zero.memory_report(adamw(make_model().parameters()))


def test_reports_can_be_read():
    _, opt = sharded(stage=2)
    assert "MiB" in str(zero.memory_report(opt))
    assert "calls" in str(zero.communication_report(opt))
    assert "stage=2" in repr(opt)
