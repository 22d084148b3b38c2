"""Habits of Horovod scripts around the optimizer: the one-line change keeps them."""

from __future__ import annotations

import math

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from training import (
    STAGES,
    Net,
    adamw,
    assert_replicated,
    assert_same,
    batch,
    distribute,
    loss_of,
    make_model,
    plain,
    train,
)

import zerohvd.torch as zero


def wrap(model, make=adamw, **options):
    options.setdefault("bucket_bytes", 1024)
    return distribute(model, make(model.parameters()), **options)


class Scaled(torch.optim.SGD):
    """An optimizer with a keyword of its own in step(), and with methods and attributes."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.rate, self.calls = 1.0, 0

    def halve(self):
        self.rate /= 2

    def step(self, closure=None, *, factor=1.0):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"] * self.rate * factor)


def run_scaled(model, opt):
    for step in range(4):
        opt.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        opt.synchronize()
        if step == 1:
            opt.halve()
        if step == 3:
            opt.rate = 0.125
        with opt.skip_synchronize():
            opt.step(factor=2.0 if step == 2 else 1.0)


@pytest.mark.parametrize("stage", STAGES)
def test_the_inner_optimizers_own_keywords_methods_and_attributes(stage):
    model = make_model()
    opt = wrap(model, Scaled, stage=stage)
    assert isinstance(opt, Scaled) and isinstance(opt, torch.optim.SGD)
    assert isinstance(opt, zero.ZeroOptimizer) and not isinstance(opt, torch.optim.Adam)
    run_scaled(model, opt)
    assert opt.calls == opt.inner.calls == 4 and opt.inner.rate == 0.125
    expected = make_model()
    inner = Scaled(expected.parameters())
    for step in range(4):
        expected.zero_grad()
        loss_of(expected, batch(step, hvd.rank())).backward()
        for p in expected.parameters():
            if p.numel():
                hvd.allreduce_(p.grad, name="habit")
        if step == 1:
            inner.halve()
        if step == 3:
            inner.rate = 0.125
        inner.step(factor=2.0 if step == 2 else 1.0)
    assert_same(expected, model, exact=False, tol=1e-7)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = opt.no_such_thing


@pytest.mark.parametrize("stage", STAGES)
def test_schedulers_and_step_hooks_see_the_wrapper(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    seen = []
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(o is opt))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    for step in range(2):
        opt.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        opt.step()
        scheduler.step()
    assert seen == [True, True] and opt.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_load_state_dict_run(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    train(model, opt, steps=1)
    seen = []

    def before(o, state):
        seen.append("before")
        groups = [{**g, "lr": 0.5} for g in state["param_groups"]]
        return {**state, "param_groups": groups}

    opt.register_state_dict_pre_hook(lambda o: seen.append("asked"))
    opt.register_load_state_dict_pre_hook(before)
    opt.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["asked", "before", 0.5]


class WithTables(nn.Module):
    """Frozen integer and boolean parameters among others."""

    def __init__(self):
        super().__init__()
        self.body = Net()
        self.order = nn.Parameter(torch.arange(4999).flip(0), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)

    def forward(self, tokens):
        return self.body(tokens) * self.mask.sum() + self.order[-1]


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_integer_parameters_stay_as_they_are(stage, shared_folder):
    expected, _ = plain(cls=WithTables)
    model = make_model(cls=WithTables)
    opt = wrap(model, stage=stage)
    train(model, opt)
    assert_same(expected, model)
    assert model.order.dtype == torch.int64 and model.order[0] == 4998
    zero.save(shared_folder / "c", model, opt)
    again = make_model(1, cls=WithTables)
    other = wrap(again, stage=stage)
    zero.load(shared_folder / "c", again, other)
    assert_same(model, again)
    opt.load_state_dict(other.state_dict())


@pytest.mark.parametrize("stage", STAGES)
def test_boolean_and_complex_buffers_are_those_of_the_first_rank(stage):
    model = make_model()
    model.register_buffer("mask", torch.tensor([hvd.rank() == 0, True]))
    model.register_buffer("turns", torch.full((3,), complex(hvd.rank(), 1)))
    _, opt = zero.zeroify(model, adamw(model.parameters()), stage=stage)
    train(model, opt, steps=1)
    assert model.mask.tolist() == [True, True] and model.turns.tolist() == [1j] * 3


class MyParameter(nn.Parameter):
    """A parameter class of the user's."""


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_of_a_subclass_keep_their_class(stage):
    model = make_model()
    model.up.weight = MyParameter(model.up.weight.data)
    opt = wrap(model, stage=stage)
    train(model, opt)
    assert type(model.up.weight) is MyParameter
    expected, _ = plain()
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_of_gradients_for_the_log(stage):
    model, twin = make_model(), make_model()
    opt = wrap(model, stage=stage)
    theirs = hvd.DistributedOptimizer(
        adamw(twin.parameters()), named_parameters=twin.named_parameters()
    )
    for step in range(2):
        for net, each in ((twin, theirs), (model, opt)):
            each.zero_grad()
            loss_of(net, batch(step, hvd.rank())).backward()
        before = opt.grad_norm()
        assert opt.clip_grad_norm_(before / 2).item() == pytest.approx(before)
        theirs.synchronize()
        assert torch.nn.utils.clip_grad_norm_(twin.parameters(), before / 2) == pytest.approx(
            before, rel=1e-5
        )
        with theirs.skip_synchronize():
            theirs.step()
        opt.step()
        assert opt.grad_norm() == pytest.approx(before / 2, rel=1e-5)
        largest = max(p.grad.abs().max() for p in twin.parameters() if p.numel())
        assert opt.grad_norm(math.inf) == pytest.approx(largest.item(), rel=1e-5)
    opt.zero_grad()
    with pytest.raises(RuntimeError, match=r"between backward\(\) and the next"):
        opt.grad_norm()


def test_stage_0_keeps_averaged_gradients_until_zero_grad():
    model, twin = make_model(), make_model()
    opt = wrap(model, stage=0)
    theirs = hvd.DistributedOptimizer(
        adamw(twin.parameters()), named_parameters=twin.named_parameters()
    )
    for net, each in ((twin, theirs), (model, opt)):
        loss_of(net, batch(0, hvd.rank())).backward()
        each.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        if p.numel():
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.skipif(hvd.size() == 1, reason="one rank agrees with itself")
def test_the_norm_on_one_rank_only_is_an_error_on_all():
    model = make_model()
    opt = wrap(model)
    train(model, opt, steps=2)
    with pytest.raises(zero.DisagreementError, match=r"grad_norm\(\).*if hvd\.rank\(\) == 0"):
        if hvd.rank() == 0:
            opt.grad_norm()
        else:
            train(model, opt, steps=1)
    assert_replicated(model)
