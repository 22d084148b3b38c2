"""Mixed precision: overflow, masters, and narrow wires."""

from __future__ import annotations

import math

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from training import (
    STAGES,
    adamw,
    assert_replicated,
    assert_same,
    batch,
    distribute,
    loss_of,
    make_model,
    plain,
    sharded,
    train,
)

import zerohvd.torch as zero

RANKS = (1, 2, 3)  # four round as three do


def narrow(dtype):
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Embedding(11, 16), nn.Linear(16, 37), nn.Tanh(), nn.Linear(37, 11)
            ).to(dtype)

        def forward(self, tokens):
            return self.body(tokens)

    return Narrow


class Wide(narrow(torch.float32)):
    pass


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_parameters_are_updated_through_float32_masters(dtype, stage):
    model, opt = sharded(cls=narrow(dtype), stage=stage, steps=10)
    assert all(p.dtype == dtype for p in model.parameters())
    masters = [m for s in opt.sections for m in s.masters]
    assert all(m is not None and m.dtype == torch.float32 for m in masters)
    assert_replicated(model)
    # Steps smaller than a narrow type can see add up in the masters.
    wide, _ = plain(cls=Wide, steps=10)
    with zero.gathered(model):
        for p, q in zip(model.parameters(), wide.parameters(), strict=True):
            torch.testing.assert_close(p.float(), q, rtol=0.05, atol=0.03)


@pytest.mark.parametrize("stage", STAGES)
def test_masters_remember_what_narrow_parameters_cannot(stage):
    model = make_model(cls=narrow(torch.bfloat16))
    opt = distribute(
        model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, bucket_bytes=256
    )
    with zero.gathered(model):
        before = [p.detach().clone() for p in model.parameters()]
    for _ in range(60):
        opt.zero_grad()
        with zero.gathered(model):
            for p in model.parameters():
                p.sum().backward()
        for group in opt.param_groups:
            group["lr"] = 5e-4
        opt.step()
    with zero.gathered(model):
        for p, q in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p.float(), q.float() - 0.03, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_written_by_horovods_broadcast_reach_the_masters(stage):
    model = make_model(seed=hvd.rank(), cls=narrow(torch.float16))
    opt = distribute(model, adamw(model.parameters()), stage=stage)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, opt)
    expected, _ = sharded(cls=narrow(torch.float16), stage=stage)
    assert_same(expected, model, exact=True)


@pytest.mark.parametrize("stage", STAGES)
def test_master_dtype_can_be_the_parameters_own(stage):
    model, opt = sharded(cls=narrow(torch.bfloat16), stage=stage, master_dtype=torch.bfloat16)
    assert all(m is None for s in opt.sections for m in s.masters)
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_compressed_gradients(wire, stage):
    expected, _ = plain(lambda p: torch.optim.SGD(p, lr=0.1))
    compression = getattr(zero.Compression, wire)
    model, opt = sharded(
        lambda p: torch.optim.SGD(p, lr=0.1), stage=stage, compression=compression
    )
    assert_same(expected, model, exact=False, tol=5e-3)
    assert_replicated(model)
    if stage in (1, 2) and hvd.size() > 1:
        moved = zero.communication_report(opt)
        assert moved["reducescatter"].bytes * 2 == moved["allgather"].bytes


@pytest.mark.parametrize("stage", STAGES)
def test_horovods_compression_objects_are_accepted(stage):
    expected, _ = sharded(stage=stage, compression=zero.Compression.fp16)
    model, _ = sharded(stage=stage, compression=hvd.Compression.fp16)
    assert_same(expected, model, exact=True)
    model, _ = sharded(stage=stage, reduce_dtype=torch.float16)
    assert_same(expected, model, exact=True)


def amp_train(model, opt, scaler, steps, poison=()):
    """The ordinary loop of torch.amp; `poison` says at which steps rank 0 overflows."""
    for step in range(steps):
        opt.zero_grad()
        loss = scaler.scale(loss_of(model, batch(step, hvd.rank())))
        if step in poison and hvd.rank() == 0:
            loss = loss * float("inf")
        loss.backward()
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_in_the_ordinary_way(unscale_first, stage):
    expected, _ = plain(steps=4)
    model = make_model()
    opt = distribute(model, adamw(model.parameters()), stage=stage, bucket_bytes=500)
    scaler = zero.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        opt.zero_grad()
        scaler.scale(loss_of(model, batch(step, hvd.rank()))).backward()
        if unscale_first:
            scaler.unscale_(opt)
            opt.clip_grad_norm_(1e6)
        scaler.step(opt)
        scaler.update()
    # Scaling by powers of two is exact.
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_an_overflow_on_one_rank_is_an_overflow_on_all(bucket_bytes, stage):
    model = make_model()
    opt = distribute(model, adamw(model.parameters()), stage=stage, bucket_bytes=bucket_bytes)
    scaler = zero.GradScaler("cpu", init_scale=2.0**10)
    amp_train(model, opt, scaler, steps=6, poison=(0, 3))
    assert scaler.get_scale() == 2.0**8
    assert all(torch.isfinite(p).all() for p in model.state_dict().values())
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_grad_scaler_where_ranks_own_nothing(stage):
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.tensor(0.5))

        def forward(self, tokens):
            return nn.functional.one_hot(tokens, 11).float() * self.a

    model = make_model(cls=Tiny)
    opt = distribute(model, adamw(model.parameters()), stage=stage)
    scaler = zero.GradScaler("cpu", init_scale=4.0)
    amp_train(model, opt, scaler, steps=4, poison=(1,))
    assert scaler.get_scale() == 2.0
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_grad_scaler_where_all_pieces_of_a_rank_are_frozen_later(stage):
    """The one bucket is cut inside the large layer, so a rank owns nothing of the small one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    opt = distribute(model, adamw(model.parameters()), stage=stage)
    scaler = zero.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        model[0].requires_grad_(step == 0)
        before = model.state_dict()["1.weight"].clone()
        opt.zero_grad()
        poison = math.inf if step == 2 and hvd.rank() == 0 else 1.0
        scaler.scale(model(torch.ones(2, 64)).sum() * poison).backward()
        scaler.step(opt)
        scaler.update()
        assert torch.equal(before, model.state_dict()["1.weight"]) == (step == 2)
    assert scaler.get_scale() == 2.0
    assert_replicated(model)


def test_a_skipped_step_uses_up_its_weight():
    model = make_model()
    opt = distribute(model, adamw(model.parameters()))
    scaler = zero.GradScaler("cpu", init_scale=4.0)
    zero.weight(hvd.rank() + 1)
    scaler.scale(loss_of(model, batch(0, hvd.rank())) * math.inf).backward()
    scaler.step(opt)
    assert scaler.get_scale() == 4.0  # until update()
    loss_of(model, batch(0, hvd.rank())).backward()
    opt.step()
    assert opt.gradients.weight is None
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_grad_scaler_with_fp16_parameters_and_masters(stage):
    model = make_model(cls=narrow(torch.float16))
    opt = distribute(model, adamw(model.parameters()), stage=stage)
    scaler = zero.GradScaler("cpu", init_scale=64.0)
    amp_train(model, opt, scaler, steps=4, poison=(2,))
    assert scaler.get_scale() == 32.0
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_autocast(stage):
    model = make_model()
    opt = distribute(model, adamw(model.parameters()), stage=stage)
    for step in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, batch(step, hvd.rank()))
        loss.backward()
        opt.step()
    assert_replicated(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())


class ScalerOfAUser(torch.amp.GradScaler):
    """As training frameworks bring their own."""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ScalerOfAUser])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_scaler_that_looks_at_one_rank_is_refused_with_the_line_to_write(
    unscale_first, kind, stage
):
    model = make_model()
    opt = distribute(model, adamw(model.parameters()), stage=stage)
    scaler = kind("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, batch(0, hvd.rank()))).backward()
    with pytest.raises(TypeError, match=r"scaler = zero\.GradScaler"):
        if unscale_first:
            scaler.unscale_(opt)
        scaler.step(opt)
    opt.step()  # the refusal has changed nothing


def test_a_scaler_that_is_switched_off_is_no_scaler():
    expected, _ = plain(steps=2)
    for kind in (torch.amp.GradScaler, zero.GradScaler):
        model, opt = sharded(steps=0)
        amp_train(model, opt, kind("cpu", enabled=False), steps=2)
        assert_same(expected, model)


def test_a_scaler_may_have_a_plain_optimizer_beside_a_sharded_one():
    model, opt = sharded(steps=0)
    other = nn.Linear(3, 1)
    beside = torch.optim.SGD(other.parameters(), lr=0.1)
    before = other.weight.detach().clone()
    scaler = zero.GradScaler("cpu", init_scale=4.0)
    loss = loss_of(model, batch(0, hvd.rank())) + other(torch.ones(3)).sum()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.step(beside)
    scaler.update()
    torch.testing.assert_close(other.weight, before - 0.1)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loop_may_skip_the_step_itself_when_unscale_has_seen_an_overflow(stage):
    model = make_model()
    opt = distribute(model, adamw(model.parameters()), stage=stage)
    scaler = zero.GradScaler("cpu", init_scale=8.0)
    loss = scaler.scale(loss_of(model, batch(0, hvd.rank())))
    (loss * (float("inf") if hvd.rank() == 0 else 1.0)).backward()
    scaler.unscale_(opt)
    scaler.update()  # and neither step() nor zero_grad()
    assert scaler.get_scale() == 4.0
    model.zero_grad()
    scaler.scale(loss_of(model, batch(1, hvd.rank()))).backward()
    scaler.step(opt)
    assert_replicated(model)
