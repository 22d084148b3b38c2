"""Places where a sharded optimizer could part from a plain one, or ranks from each other."""

from __future__ import annotations

import gc
import weakref

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from training import (
    STAGES,
    MatrixNet,
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


def wrap(model, make=adamw, **options):
    return distribute(model, make(model.parameters()), **options)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_in_a_single_bucket(stage):
    def run(opt_of):
        model = make_model()
        opt = opt_of(model)
        for step in range(4):
            opt.zero_grad()
            for m in range(3):
                loss_of(model, batch(10 * step + m, hvd.rank())).backward()
            opt.step()
        return model

    expected = run(
        lambda m: hvd.DistributedOptimizer(
            adamw(m.parameters()),
            named_parameters=m.named_parameters(),
            backward_passes_per_step=3,
        )
    )
    model = run(lambda m: wrap(m, stage=stage, backward_passes_per_step=3))
    assert_same(expected, model, exact=stage < 2 and hvd.size() <= 2)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head, self.aux = nn.Linear(8, 11), nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.body:
            x = layer(x)
        return self.head(x) + (self.aux(x) if hvd.rank() == 0 else 0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_users_collective_between_backward_and_step(stage, monkeypatch):
    """One rank has buckets that wait for an unused head, the other waits for those buckets."""
    monkeypatch.setattr("zerohvd.communication.rounds.PATIENCE", 0.1)
    model = make_model(cls=TwoHeads)
    opt = wrap(model, stage=stage, bucket_bytes=64)
    for step in range(2):
        opt.zero_grad()
        loss = loss_of(model, batch(step, hvd.rank()))
        loss.backward()
        hvd.allreduce(loss.detach(), name="logged loss")
        opt.step()
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_a_deleted_optimizer_lets_go_of_the_model(stage):
    expected, _ = plain()
    model = make_model()
    first = wrap(model, stage=stage)
    with pytest.raises(ValueError, match="belongs to another sharded optimizer"):
        wrap(model, stage=stage)
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    closed = wrap(model, stage=stage)
    closed.close()
    opt = wrap(model, stage=stage)
    train(model, opt)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_skipped_step_everything_is_new(stage):
    """Overflow, then a step whose first pass runs under no_sync()."""
    model = make_model(cls=MatrixNet)
    opt = wrap(model, stage=stage)
    scaler = zero.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        model.zero_grad()
        with opt.no_sync():
            loss = scaler.scale(loss_of(model, batch(step, hvd.rank())))
            (loss * (float("inf") if step == 0 else 1.0)).backward()
        scaler.step(opt)
        scaler.update()
    assert scaler.get_scale() == 4.0
    expected = make_model(cls=MatrixNet)
    oracle = adamw(expected.parameters())
    for step in (1, 2):
        oracle.zero_grad()
        parts = [batch(step, r) for r in range(hvd.size())]
        loss_of(expected, tuple(torch.cat(t) for t in zip(*parts, strict=True))).backward()
        oracle.step()
    assert_same(expected, model, exact=False)


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_frozen_parameters_is_kept_for_later(stage):
    model, opt = sharded(cls=MatrixNet, stage=stage)
    full = opt.state_dict()
    other = make_model(cls=MatrixNet)
    other.load_state_dict(model.state_dict())
    other.up.requires_grad_(False)
    again = wrap(other, stage=stage)
    again.load_state_dict(full)
    assert again.state_dict()["state"].keys() == full["state"].keys()
    other.up.requires_grad_(True)
    train(model, opt, first=5)
    train(other, again, first=5)
    assert_same(model, other, exact=True)


def test_an_optimizer_of_some_ranks_disturbs_no_later_one(only_first):
    if hvd.rank() == 0:
        alone = make_model()
        train(alone, wrap(alone, process_set=only_first), steps=1)
    expected, _ = plain()
    model, _ = sharded()
    assert_same(expected, model)


def test_weights_must_be_given_once_and_in_time():
    model = make_model(cls=MatrixNet)
    opt = wrap(model, backward_passes_per_step=2)
    zero.weight(2)
    loss_of(model, batch(0, hvd.rank())).backward()
    zero.weight(3)
    with pytest.raises(ValueError, match="one weight per step"):
        loss_of(model, batch(1, hvd.rank())).backward()
    zero.weight(2)
    opt.step()
    model.zero_grad()
    loss_of(model, batch(2, hvd.rank())).backward()
    zero.weight(2)
    with pytest.raises(ValueError, match="one weight per step"):
        opt.step()


def test_a_step_without_samples_can_be_dropped():
    model = make_model(cls=MatrixNet)
    opt = wrap(model)
    zero.weight(0)
    with pytest.raises(ValueError, match="weight 0"):
        opt.step()
    opt.zero_grad()
    zero.weight(1)
    loss_of(model, batch(0, hvd.rank())).backward()
    opt.step()


def test_large_weights_do_not_overflow_a_narrow_wire():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt = wrap(model, lambda p: torch.optim.SGD(p, lr=1.0), compression=zero.Compression.fp16)
    zero.weight(50_000)
    (2 * model(torch.ones(1, 1))).sum().backward()
    opt.step()
    assert model.weight.item() == pytest.approx(-2.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_under_no_sync_after_the_last_one_is_refused(stage):
    model = make_model(cls=MatrixNet)
    opt = wrap(model, stage=stage)
    loss_of(model, batch(0, hvd.rank())).backward()
    with opt.no_sync(), pytest.raises(RuntimeError, match="backward_passes_per_step"):
        loss_of(model, batch(1, hvd.rank())).backward()


@pytest.mark.skipif(hvd.size() == 1, reason="one rank agrees with itself")
@pytest.mark.parametrize("what", ["state", "rate"])
def test_state_or_rates_set_on_one_rank_only(what):
    model, opt = sharded(cls=MatrixNet)
    state = opt.state_dict()
    if hvd.rank() == 0:
        if what == "state":
            opt.load_state_dict(state)
        else:
            opt.param_groups[0]["lr"] = 0.5
    with pytest.raises(zero.DisagreementError, match="on every rank"):
        train(model, opt, steps=1)


class Odd(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["nested"] = {"inner": p.clone()}


def test_state_that_cannot_be_collected_is_an_error_on_all():
    _, opt = sharded(lambda p: Odd(p), cls=MatrixNet)
    if hvd.size() > 1:
        with pytest.raises(TypeError, match=r"state 'nested' of '[a-z.]+' is a dict"):
            opt.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_backward_that_builds_a_graph(stage):
    def run(opt_of):
        model = make_model(cls=MatrixNet)
        opt = opt_of(model)
        for step in range(2):
            opt.zero_grad()
            loss_of(model, batch(step, hvd.rank())).backward(create_graph=True)
            opt.step()
        return model

    expected, _ = plain(cls=MatrixNet, steps=2)
    assert_same(expected, run(lambda m: wrap(m, stage=stage)), exact=False)


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_from_before_the_step_cannot_be_used(stage):
    model = make_model(cls=MatrixNet)
    opt = wrap(model, stage=stage)
    loss = loss_of(model, batch(0, hvd.rank()))
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_named_parameters_in_the_inner_optimizer():
    model = make_model(cls=MatrixNet)
    opt = zero.DistributedOptimizer(torch.optim.AdamW(model.embed.named_parameters(), lr=1e-2))
    opt.add_param_group({"params": list(model.up.named_parameters())})
    opt.add_param_group({"params": model.head.parameters(), "param_names": ["w", "b"]})
    train(model, opt)
    assert_replicated(model)
    state = opt.state_dict()
    assert [len(g["params"]) for g in state["param_groups"]] == [1, 2, 2]


def test_hooks_on_the_state_dict_run():
    _, opt = sharded(cls=MatrixNet)
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    opt.register_state_dict_post_hook(lambda o, s: {**s, "marked": True})
    assert opt.state_dict()["marked"]
    assert seen == ["pre"]


def test_states_of_older_torch_versions_load():
    model, opt = sharded(cls=MatrixNet)
    state = opt.state_dict()
    for values in state["state"].values():
        values["step"] = int(values["step"].item())
    opt.load_state_dict(state)
    train(model, opt, first=5)
    expected, _ = sharded(cls=MatrixNet, steps=10)
    assert_same(expected, model, exact=True)


def test_a_subclass_without_a_step_of_its_own_is_cut_flat():
    class Renamed(torch.optim.Adam):
        pass

    for _ in range(2):
        _, opt = sharded(lambda p: Renamed(p, lr=1e-2), cls=MatrixNet, steps=1)
        assert opt.config.partition == "flat"


def test_parameters_without_values_are_refused():
    with pytest.raises(ValueError, match="meta device"):
        wrap(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="lazy module"):
        wrap(nn.LazyLinear(2))


def test_a_model_without_trainable_parameters():
    model = nn.Linear(2, 2).requires_grad_(False)
    opt = wrap(model)
    before = model.weight.clone()
    opt.step()
    assert torch.equal(before, model.weight)


@pytest.mark.parametrize("stage", [1, 2])
def test_nothing_is_held_after_zero_grad(stage):
    _, opt = sharded(cls=MatrixNet, stage=stage)
    assert zero.memory_report(opt)["grads"] > 0
    opt.zero_grad()
    assert zero.memory_report(opt)["grads"] == 0
