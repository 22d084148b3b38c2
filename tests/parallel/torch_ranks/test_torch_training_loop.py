"""What training scripts do besides backward() and step()."""

from __future__ import annotations

import copy

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

RANKS = (1, 2, 4)  # every test has a loop of its own


def wrap(model, make=adamw, **options):
    options.setdefault("bucket_bytes", 1024)
    return distribute(model, make(model.parameters()), **options)


def micro_batches(step, count=3):
    return [batch(100 * step + m, hvd.rank()) for m in range(count)]


def accumulate(model, opt, steps=4, no_sync=False):
    for step in range(steps):
        opt.zero_grad()
        *first, last = micro_batches(step)
        for data in first:
            if no_sync:
                with opt.no_sync():
                    loss_of(model, data).backward()
            else:
                loss_of(model, data).backward()
        loss_of(model, last).backward()
        opt.step()


def accumulated_by_horovod():
    model = make_model()
    opt = hvd.DistributedOptimizer(
        adamw(model.parameters()),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=3,
    )
    accumulate(model, opt)
    return model


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_matches_horovod(stage):
    model = make_model()
    accumulate(model, wrap(model, stage=stage, backward_passes_per_step=3))
    # Stage 2 adds up reduced passes, Horovod reduces added passes: the same but for rounding.
    assert_same(accumulated_by_horovod(), model, exact=stage < 2 and hvd.size() <= 2)
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_defers_everything(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    with opt.no_sync():
        loss_of(model, batch(0, hvd.rank())).backward()
    moved = zero.communication_report(opt)
    assert "reducescatter" not in moved if stage == 3 else moved["total"].calls == 0
    opt.zero_grad()
    accumulate(model, opt, no_sync=True)
    assert_same(accumulated_by_horovod(), model)


def test_stage_1_moves_nothing_before_the_boundary():
    model = make_model()
    opt = wrap(model, stage=1, backward_passes_per_step=2)
    loss_of(model, batch(0, hvd.rank())).backward()
    assert "reducescatter" not in zero.communication_report(opt)
    loss_of(model, batch(1, hvd.rank())).backward()
    opt.step()
    if hvd.size() > 1:
        assert zero.communication_report(opt)["reducescatter"].calls > 0


def test_stage_2_keeps_only_shards_between_passes():
    model = make_model()
    opt = wrap(model, stage=2, backward_passes_per_step=2)
    loss_of(model, batch(0, hvd.rank())).backward()
    held = [n for n, p in model.named_parameters() if p.grad.untyped_storage().nbytes() > 4]
    assert not held
    loss_of(model, batch(1, hvd.rank())).backward()
    opt.step()


@pytest.mark.parametrize("stage", STAGES)
def test_one_pass_too_many_is_refused(stage):
    model = make_model()
    _opt = wrap(model, stage=stage)
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(RuntimeError, match="backward_passes_per_step=1"):
        loss_of(model, batch(1, hvd.rank())).backward()


@pytest.mark.parametrize("stage", STAGES)
def test_passes_per_step_can_change(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    opt.set_backward_passes_per_step(3)
    accumulate(model, opt)
    assert_same(accumulated_by_horovod(), model, exact=stage < 2 and hvd.size() <= 2)


@pytest.mark.parametrize("stage", STAGES)
def test_fewer_passes_than_announced(stage):
    expected, _ = plain()
    model, _ = sharded(stage=stage, backward_passes_per_step=4)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, float("inf")])
def test_clipping_uses_the_norm_of_all_ranks(p, stage):
    expected, model = make_model(), make_model()
    theirs = hvd.DistributedOptimizer(
        adamw(expected.parameters()), named_parameters=expected.named_parameters()
    )
    opt = wrap(model, stage=stage)
    for step in range(4):
        data = batch(step, hvd.rank())
        theirs.zero_grad()
        opt.zero_grad()
        loss_of(expected, data).backward()
        theirs.synchronize()
        held = [q for q in expected.parameters() if q.numel()]  # torch's inf-norm wants elements
        norm = torch.nn.utils.clip_grad_norm_(held, 0.05, norm_type=p)
        with theirs.skip_synchronize():
            theirs.step()
        loss_of(model, data).backward()
        ours = opt.clip_grad_norm_(0.05, norm_type=p)
        opt.step()
        torch.testing.assert_close(ours, norm, rtol=1e-5, atol=1e-7)
    assert_same(expected, model, exact=False, tol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_grad_clip_clips_in_every_step(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    for step in range(3):
        opt.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        opt.clip_grad_norm_(0.05)
        opt.step()
    other, _ = sharded(steps=3, stage=stage, grad_clip=0.05)
    assert_same(model, other)


@pytest.mark.parametrize("stage", STAGES)
def test_synchronize_then_step_as_horovod_scripts_do(stage):
    expected, _ = plain()
    model = make_model()
    opt = wrap(model, stage=stage)
    for step in range(5):
        opt.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        opt.synchronize()
        opt.clip_grad_norm_(1e9)
        with opt.skip_synchronize():
            opt.step()
    assert_same(expected, model)
    opt.zero_grad()
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(RuntimeError, match="without synchronize"), opt.skip_synchronize():
        opt.step()
    opt.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_closure_is_evaluated_once_and_its_loss_returned(stage):
    expected, _ = plain()
    model = make_model()
    opt = wrap(model, stage=stage)
    for step in range(5):

        def closure(step=step):
            opt.zero_grad()
            loss = loss_of(model, batch(step, hvd.rank()))
            loss.backward()
            return loss

        assert opt.step(closure).item() > 0
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_optimizer_or_model(set_to_none, stage):
    expected, _ = plain()
    for of_model in (False, True):
        model = make_model()
        opt = wrap(model, stage=stage)
        for step in range(5):
            (model if of_model else opt).zero_grad(set_to_none=set_to_none)
            loss_of(model, batch(step, hvd.rank())).backward()
            opt.step()
        assert_same(expected, model)


@pytest.mark.parametrize("stage", [1, 2])
def test_reduced_gradients_do_not_leak_into_the_next_step(stage):
    """Also where zero_grad() is never called: nothing partly reduced stays in the model."""
    expected, _ = plain()
    model = make_model()
    opt = wrap(model, stage=stage)
    for step in range(5):
        loss_of(model, batch(step, hvd.rank())).backward()
        opt.step()
        assert all(p.grad is None for p in model.parameters())
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_while_gradients_are_on_their_way_is_refused(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(RuntimeError, match="before backward"):
        opt.zero_grad()
    opt.step()


@pytest.mark.parametrize("stage", STAGES)
def test_schedulers_and_edits_of_the_learning_rate(stage):
    def run(wrapped):
        model = make_model()
        opt = wrapped(model)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
        for step in range(6):
            train(model, opt, steps=1, first=step)
            scheduler.step()
            if step == 3:
                opt.param_groups[0]["weight_decay"] = 0.3
        assert opt.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.125)
        return model

    expected = run(
        lambda m: hvd.DistributedOptimizer(
            adamw(m.parameters()), named_parameters=m.named_parameters()
        )
    )
    assert_same(expected, run(lambda m: wrap(m, stage=stage)))


@pytest.mark.parametrize("stage", STAGES)
def test_a_scheduler_made_before_wrapping_still_rules(stage):
    model = make_model()
    inner = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    opt = distribute(model, inner, stage=stage)
    train(model, opt, steps=1)
    scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(5e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_parameter_groups_keep_their_options(stage):
    def groups(model):
        return torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.5},
                {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.1},
            ],
            lr=1e-2,
        )

    def run(wrapped):
        model = make_model()
        train(model, wrapped(model, groups(model)))
        return model

    expected = run(
        lambda m, opt: hvd.DistributedOptimizer(opt, named_parameters=m.named_parameters())
    )
    model = run(lambda m, opt: distribute(m, opt, stage=stage, bucket_bytes=300))
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_add_param_group(stage):
    def run(zeroed):
        model = make_model()
        extra = nn.Parameter(torch.linspace(-1, 1, 13))
        inner = adamw(model.parameters())
        if zeroed:
            opt = distribute(model, inner, stage=stage, bucket_bytes=1024)
            opt.add_param_group({"params": [extra], "lr": 0.1, "param_names": ["extra"]})
        else:
            inner.add_param_group({"params": [extra], "lr": 0.1})
            opt = hvd.DistributedOptimizer(inner)
        for step in range(5):
            opt.zero_grad()
            loss = loss_of(model, batch(step, hvd.rank())) + (extra * (hvd.rank() + 1)).pow(2).sum()
            loss.backward()
            opt.step()
        model.extra = extra
        return model

    assert_same(run(zeroed=False), run(zeroed=True))


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_parameters_stay_as_they_are(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    train(model, opt, steps=2)
    model.up.weight.requires_grad_(False)
    before, moved = model.up.state_dict().values()
    before, moved = before.clone(), moved.clone()
    train(model, opt, steps=2, first=2)
    weight, bias = model.up.state_dict().values()
    assert torch.equal(before, weight)
    assert not torch.equal(moved, bias)
    model.up.weight.requires_grad_(True)
    train(model, opt, steps=1, first=4)
    assert not torch.equal(before, model.up.state_dict()["weight"])
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_frozen_at_first_can_be_unfrozen(stage):
    def run(zeroed):
        model = make_model()
        model.up.requires_grad_(False)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        opt = distribute(model, inner, stage=stage) if zeroed else inner
        for step in range(6):
            if step == 3:
                model.up.requires_grad_(True)
            opt.zero_grad()
            loss_of(model, batch(step, 0)).backward()
            if not zeroed:
                for p in model.parameters():
                    if p.requires_grad and p.grad is None:
                        p.grad = torch.zeros_like(p)
            opt.step()
        return model

    assert_same(run(False), run(True), exact=hvd.size() in (1, 2, 4))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        used = self.experts[hvd.rank() % len(self.experts)]
        return self.head(used(self.embed(tokens)))


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_use_different_parameters(stage):
    expected, _ = plain(cls=Branching)
    model, _ = sharded(cls=Branching, stage=stage, bucket_bytes=100)
    assert_same(expected, model)
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_any_gradient_does_not_hang(stage):
    model = make_model()
    opt = wrap(model, stage=stage)
    opt.step()
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_fewer_elements_than_ranks(stage):
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.tensor(0.5))

        def forward(self, tokens):
            return nn.functional.one_hot(tokens, 11).float() * self.a

    expected, _ = plain(cls=Tiny)
    model, opt = sharded(cls=Tiny, stage=stage)
    assert_same(expected, model)
    owned = torch.tensor([sum(len(s.owned) for s in opt.sections)])
    sizes = hvd.allgather(owned, name="owned")
    assert sizes.sum() == (hvd.size() if stage == 0 else 1)


@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_for_two_models(stage):
    expected, _ = plain()
    first, second = make_model(), make_model()
    opts = [wrap(first, stage=stage), wrap(second, stage=stage)]
    for step in range(5):
        data = batch(step, hvd.rank())
        for opt in opts:
            opt.zero_grad()
        (loss_of(first, data) + loss_of(second, data)).backward()
        for opt in opts:
            opt.step()
    assert_same(expected, first)
    assert_same(expected, second)


@pytest.mark.parametrize("stage", STAGES)
def test_activation_checkpointing(stage):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Branching):
        def forward(self, tokens):
            x = self.embed(tokens)
            for i, expert in enumerate(self.experts):
                x = checkpoint(expert, x, use_reentrant=bool(i % 2))
            return self.head(x)

    expected, _ = plain(cls=Checkpointed)
    model, _ = sharded(cls=Checkpointed, stage=stage, bucket_bytes=100)
    assert_same(expected, model)


def test_moving_the_model_afterwards_is_an_error_that_names_the_parameter():
    model = make_model()
    opt = wrap(model)
    train(model, opt, steps=1)
    model.up.double()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match=r"'up\.weight'.*other memory"):
        opt.step()


def test_the_wrapped_optimizer_cannot_be_copied():
    model = make_model()
    opt = wrap(model)
    with pytest.raises(zero.ShardedStateError, match="state_dict"):
        copy.deepcopy(opt)
