"""Scripts that clip, scale or look at `param.grad` between backward() and step()."""

from __future__ import annotations

import copy
import io
import itertools
import math
from contextlib import nullcontext

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from training import STAGES, MatrixNet, adamw, assert_same, batch, distribute, loss_of, make_model

import zerohvd.torch as zero

RANKS = (2, 3)  # two are bitwise, three have other sums


def wrap(model, make=adamw, **options):
    options.setdefault("bucket_bytes", 1024)
    return distribute(model, make(model.parameters()), **options)


def used(model):
    """torch's inf-norm wants elements."""
    return [p for p in model.parameters() if p.numel()]


def by_horovod(clip, steps=4, make=adamw):
    """Plain data parallelism, in which `clip(model)` comes between backward() and step()."""
    model = make_model()
    opt = hvd.DistributedOptimizer(
        make(model.parameters()), named_parameters=model.named_parameters()
    )
    said = []
    for step in range(steps):
        opt.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        opt.synchronize()
        said.append(clip(model))
        with opt.skip_synchronize():
            opt.step()
    return model, said


def by_us(clip, stage, steps=4, make=adamw, synchronize=False, **options):
    model = make_model()
    opt = wrap(model, make, stage=stage, **options)
    said = []
    for step in range(steps):
        opt.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        if synchronize:
            opt.synchronize()
            said.append(clip(model))
            with opt.skip_synchronize():
                opt.step()
        else:
            said.append(clip(model))
            opt.step()
    return model, said


def sgd(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


CLIPS = {
    "norm": lambda m: clip_grad_norm_(used(m), 0.05),
    "norm of a generator": lambda m: clip_grad_norm_((p for p in used(m)), 0.05),
    "1-norm": lambda m: clip_grad_norm_(used(m), 0.5, 1.0),
    "inf-norm": lambda m: clip_grad_norm_(used(m), 0.01, norm_type=math.inf),
    "one by one": lambda m: clip_grad_norm_(used(m), 0.05, foreach=False),
    "foreach": lambda m: clip_grad_norm_(used(m), 0.05, foreach=True),
    "a subset": lambda m: clip_grad_norm_(list(m.up.parameters()), 0.01),
    "one parameter": lambda m: clip_grad_norm_(m.embed.weight, 0.01),
    "groups apart": lambda m: torch.stack(
        [clip_grad_norm_(child.parameters(), 0.01) for child in (m.up, m.down)]
    ),
    "total norm": lambda m: total_norm(used(m)),
    "by hand": lambda m: clip_by_hand(used(m)),
}
EXACT = {
    "value": lambda m: clip_grad_value_(used(m), 0.003),
    "value one by one": lambda m: clip_grad_value_(used(m), 0.003, foreach=False),
    "value foreach": lambda m: clip_grad_value_(used(m), 0.003, foreach=True),
    "clamp_": lambda m: [p.grad.clamp_(-0.003, 0.003) for p in used(m)],
    "data.clamp_": lambda m: [p.grad.data.clamp_(-0.003, 0.003) for p in used(m)],
    "scaled": lambda m: [p.grad.div_(4.0) for p in used(m)],
    "rows": lambda m: m.embed.weight.grad.__setitem__(slice(0, 3), 0.0),
    "masked": lambda m: m.up.weight.grad.mul_(torch.arange(7) % 2),
    "decayed": lambda m: m.up.bias.grad.add_(torch.linspace(0, 1, 37), alpha=0.1),
    "no gradient": lambda m: setattr(m.up.weight, "grad", None),
    "cleared": lambda m: m.zero_grad(),
}


def total_norm(params):
    norm = torch.nn.utils.get_total_norm([p.grad for p in params])
    torch.nn.utils.clip_grads_with_norm_(params, 0.05, norm)
    return norm


def clip_by_hand(params):
    total = 0.0
    for p in params:
        total += p.grad.data.norm(2).item() ** 2
    total = total**0.5
    if total > 0.05:
        for p in params:
            p.grad.data.mul_(0.05 / total)
    return torch.tensor(total)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", CLIPS)
def test_clipping_by_torchs_own_function_clips_what_is_applied(how, stage):
    expected, theirs = by_horovod(CLIPS[how], make=sgd)
    model, ours = by_us(CLIPS[how], stage, make=sgd)
    torch.testing.assert_close(
        torch.stack(ours).double(), torch.stack(theirs).double(), rtol=1e-5, atol=1e-7
    )
    assert_same(expected, model, exact=False, tol=1e-6)
    free, _ = by_us(lambda m: None, stage, make=sgd)
    with pytest.raises(AssertionError):  # it has made a difference
        assert_same(free, model, exact=False, tol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", EXACT)
def test_changing_gradients_in_place_changes_what_is_applied(how, stage):
    for synchronize in (False, True):
        expected, _ = by_horovod(EXACT[how]) if how != "cleared" else (make_model(), None)
        model, _ = by_us(EXACT[how], stage, synchronize=synchronize)
        assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_clipping_is_the_optimizers_own(stage):
    model, norms = by_us(CLIPS["norm"], stage)
    other = make_model()
    opt = wrap(other, stage=stage)
    for step, norm in enumerate(norms):
        opt.zero_grad()
        loss_of(other, batch(step, hvd.rank())).backward()
        torch.testing.assert_close(opt.clip_grad_norm_(0.05), norm.float())
        opt.step()
    assert_same(other, model, exact=stage > 0, tol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_norm_that_is_not_finite_raises_on_every_rank_if_asked_to(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    loss = loss_of(model, batch(0, hvd.rank()))
    (loss * math.inf if hvd.rank() == hvd.size() - 1 else loss).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(used(model), 1.0, error_if_nonfinite=True)
    opt.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_half_precision_gradients_are_clipped_in_the_masters_precision(stage):
    def clip(model):
        return clip_grad_norm_(used(model), 0.05)

    norms, models = [], []
    for ours in (False, True):
        model = make_model().to(torch.bfloat16)
        opt = wrap(model, sgd, stage=stage)
        for step in range(3):
            opt.zero_grad()
            loss_of(model, batch(step, hvd.rank())).backward()
            norms.append(float(opt.clip_grad_norm_(0.05) if ours else clip(model)))
            opt.step()
        models.append(model)
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-6)
    assert_same(*models, exact=True)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_two_optimizers_are_clipped_together(stage):
    def parts(model):
        return list(model.up.parameters()), [*model.embed.parameters(), *model.head.parameters()]

    def run(make):
        torch.manual_seed(0)
        model = MatrixNet()
        opts = [make(part) for part in parts(model)]
        for step in range(3):
            for opt in opts:
                opt.zero_grad()
            loss_of(model, batch(step, hvd.rank())).backward()
            if hasattr(opts[0], "_handles"):
                for opt in opts:
                    opt.synchronize()
            norm = clip_grad_norm_(model.parameters(), 0.05)
            for opt in opts:
                with opt.skip_synchronize() if hasattr(opt, "_handles") else nullcontext():
                    opt.step()
        return model, norm

    if stage == 3:
        pytest.skip("one model has one optimizer at stage 3")
    names = itertools.count()
    expected, theirs = run(
        lambda part: hvd.DistributedOptimizer(
            sgd(part), [(f"two.{next(names)}", p) for p in part]
        )
    )
    model, ours = run(lambda part: zero.DistributedOptimizer(sgd(part), stage=stage))
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-5, atol=1e-7)
    assert_same(expected, model, exact=False, tol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_after_the_last_of_several_passes(stage):
    def run(opt, model, clip):
        for step in range(3):
            opt.zero_grad()
            for k in range(2):
                loss_of(model, batch(2 * step + k, hvd.rank())).backward()
            clip()
            opt.step()

    expected, model = make_model(), make_model()
    theirs = wrap(expected, sgd, stage=stage, backward_passes_per_step=2)
    run(theirs, expected, lambda: theirs.clip_grad_norm_(0.05))
    ours = wrap(model, sgd, stage=stage, backward_passes_per_step=2)
    run(ours, model, lambda: clip_grad_norm_(used(model), 0.05))
    assert_same(expected, model, exact=False, tol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
def test_clipping_in_the_middle_of_several_passes_is_refused(stage):
    model = make_model()
    opt = wrap(model, stage=stage, backward_passes_per_step=2)
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(RuntimeError, match="1 of backward_passes_per_step=2"):
        clip_grad_norm_(used(model), 0.05)
    loss_of(model, batch(1, hvd.rank())).backward()
    clip_grad_norm_(used(model), 0.05)
    opt.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_sharded_gradient_cannot_answer_says_what_to_write(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    loss_of(model, batch(0, hvd.rank())).backward()
    grad = model.up.weight.grad
    assert grad.shape == (37, 7) and grad.numel() == 259 and grad.dtype == torch.float32
    assert "gradient of 'up.weight'" in repr(grad)
    with pytest.raises(zero.ShardedStateError):  # at stage 3 the parameter itself refuses
        torch.optim.SGD([model.up.weight], lr=0.1).step()
    for read in (
        lambda: grad.clone(),
        lambda: grad.mean(),
        lambda: grad + 1,
        lambda: torch.isnan(grad),
        lambda: grad.numpy(),
        lambda: grad[0],
        lambda: grad.norm(dim=0),
        lambda: grad.T,
        lambda: model.up.bias.grad.tolist(),
        lambda: copy.deepcopy(grad),
        lambda: torch.save(grad, io.BytesIO()),
        lambda: hvd.allreduce(grad, name="by hand"),
    ):
        with pytest.raises(zero.ShardedStateError, match=r"opt\.grad_norm\(\)"):
            read()
    opt.step()
    with pytest.raises(RuntimeError, match="a step that is over"):
        grad.norm()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_another_tensor_in_the_place_of_a_gradient_is_refused(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    loss_of(model, batch(0, hvd.rank())).backward()
    model.up.bias.grad = torch.zeros(37)
    with pytest.raises(RuntimeError, match=r"gradient of 'up\.bias' was replaced"):
        opt.step()


@pytest.mark.parametrize("way", ["another", "data", "turned"])
def test_another_tensor_in_the_place_of_a_gradient_counts_at_stage_0(way):
    def halve(model):
        bias, weight = model.up.bias, model.up.weight
        if way == "another":
            bias.grad = bias.grad * 0.5
        elif way == "data":
            bias.grad.data = bias.grad * 0.5
        else:
            weight.grad = weight.grad.flatten().view(7, 37).t()

    expected, _ = by_horovod(halve)
    model, _ = by_us(halve, 0, synchronize=True)
    assert_same(expected, model)
    model, _ = by_us(halve, 0)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_two_losses_that_share_no_parameter(stage):
    """The second backward pass adds to gradients which stand-ins stand for."""

    def run(opt, model):
        for step in range(3):
            opt.zero_grad()
            x = torch.full((2, 3), float(step + hvd.rank()))
            model[0](x).pow(2).sum().backward()
            model[1](x).pow(2).sum().backward()
            opt.step()

    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 5)])
    expected = copy.deepcopy(model)
    run(hvd.DistributedOptimizer(sgd(expected.parameters())), expected)
    run(wrap(model, sgd, stage=stage), model)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_that_is_deleted_in_a_step_leaves_plain_gradients(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    loss_of(model, batch(0, hvd.rank())).backward()
    opt.synchronize()
    del opt
    loss_of(model, batch(0, hvd.rank())).backward()
    assert model.up.weight.grad.isfinite().all()
    plain = adamw(model.parameters())
    plain.step()


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_the_pieces_of_the_groups_is_refused(stage):
    """Every rank has others there, whose gradients have not come yet: it would clip nothing."""
    model = make_model()
    opt = wrap(model, stage=stage)
    for step in range(2):
        opt.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        for group in opt.param_groups:
            params = [p for p in group["params"] if p.numel()]
            for clip in (
                lambda p: nn.utils.clip_grad_norm_(p, 0.2),
                lambda p: nn.utils.clip_grad_norm_(p, 0.2, foreach=False),
                lambda p: nn.utils.clip_grad_value_(p, 0.1),
                lambda p: [q.grad.data.clamp_(-1, 1) for q in p if q.grad is not None],
                lambda p: sum(q.grad.norm() ** 2 for q in p),
            ):
                if params:
                    with pytest.raises(zero.ShardedStateError, match=r"model\.parameters\(\)"):
                        clip(params)
        opt.step()
        assert all(p.grad is None for group in opt.param_groups for p in group["params"])
    expected, _ = by_horovod(lambda model: None, steps=2)
    assert_same(expected, model)
