"""Sharded training gives what plain data parallelism gives."""

from __future__ import annotations

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
    sharded,
    train,
)

import zerohvd.torch as zero

O = torch.optim  # noqa: E741

ELEMENTWISE = {
    "sgd": lambda p: O.SGD(p, lr=0.1),
    "sgd-nesterov": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-fused": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd-maximize": lambda p: O.SGD(p, lr=0.01, maximize=True),
    "adam": lambda p: O.Adam(p, lr=1e-2),
    "adam-amsgrad": lambda p: O.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adam-tensor-lr": lambda p: O.Adam(p, lr=torch.tensor(1e-2)),
    "adamw": lambda p: O.AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: O.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: O.AdamW(p, lr=1e-2, fused=True),
    "nadam": lambda p: O.NAdam(p, lr=1e-2),
    "radam": lambda p: O.RAdam(p, lr=1e-2),
    "adamax": lambda p: O.Adamax(p, lr=1e-2),
    "adagrad": lambda p: O.Adagrad(p, lr=1e-2),
    "adagrad-fused": lambda p: O.Adagrad(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: O.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "rprop": lambda p: O.Rprop(p, lr=1e-2),
    "asgd": lambda p: O.ASGD(p, lr=1e-2),
    "adadelta": lambda p: O.Adadelta(p, lr=1.0),
}


class Lamb(O.Optimizer):
    """Scales each update by norms of the whole parameter: wrong on anything less than it."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                ratio = p.norm() / (state["mean"].norm() + 1e-6)
                p.sub_(state["mean"] * ratio.clamp(0.1, 10), alpha=group["lr"])


class Centred(O.SGD):
    """A user's subclass that looks at whole tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sub_(p.grad.mean())
        return super().step(closure)


class NoEmpty(Net):
    """Adafactor divides by the number of elements."""

    def __init__(self):
        super().__init__()
        del self.nothing


class MatricesOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Embedding(11, 7), nn.Linear(7, 13, bias=False), nn.Linear(13, 11, bias=False)
        )

    def forward(self, tokens):
        return self.body(tokens)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer_matches_horovod(name, stage):
    expected, _ = plain(ELEMENTWISE[name])
    model, opt = sharded(ELEMENTWISE[name], stage=stage)
    assert opt.config.partition == "flat"
    assert_same(expected, model)
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "make",
    [lambda p: O.Adafactor(p, lr=1e-2), Lamb, lambda p: Centred(p, lr=0.1)],
    ids=["adafactor", "lamb", "user-subclass"],
)
def test_whole_tensor_optimizers_get_whole_parameters(make, stage):
    expected, _ = plain(make, cls=NoEmpty)
    model, opt = sharded(make, cls=NoEmpty, stage=stage)
    assert opt.config.partition == "parameter"
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_muon_gets_whole_matrices(stage):
    if not hasattr(O, "Muon"):
        pytest.skip("this torch has no Muon")
    expected, _ = plain(lambda p: O.Muon(p, lr=1e-2), cls=MatricesOnly)
    model, _ = sharded(lambda p: O.Muon(p, lr=1e-2), cls=MatricesOnly, stage=stage)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bucket_bytes", [1, 64, 500, 8 << 20])
@pytest.mark.parametrize("partition", ["flat", "parameter"])
def test_the_bucket_size_changes_nothing(bucket_bytes, partition, stage):
    expected, _ = plain()
    model, _ = sharded(stage=stage, bucket_bytes=bucket_bytes, partition=partition)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_stay_equal_over_twenty_steps(stage):
    expected, _ = plain(ELEMENTWISE["adamw-fused"], steps=20)
    model, _ = sharded(ELEMENTWISE["adamw-fused"], steps=20, stage=stage)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_on_the_whole_batch_gives_the_same(stage):
    model, _ = sharded(stage=stage)
    alone = make_model()
    opt = adamw(alone.parameters())
    for step in range(5):
        parts = [batch(step, r) for r in range(hvd.size())]
        opt.zero_grad()
        loss_of(alone, tuple(torch.cat(t) for t in zip(*parts, strict=True))).backward()
        # As under Horovod, parameters without a gradient are updated with zeros.
        for p in alone.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        opt.step()
    assert_same(alone, model, exact=False, tol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_sum_and_predivide_match_horovod(stage):
    expected, _ = plain(ELEMENTWISE["sgd"], op=hvd.Sum)
    model, _ = sharded(ELEMENTWISE["sgd"], op=hvd.Sum, stage=stage)
    assert_same(expected, model)
    expected, _ = plain(gradient_predivide_factor=2.0)
    model, _ = sharded(gradient_predivide_factor=2.0, stage=stage)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_groups_of_horovod_are_accepted(stage):
    expected, _ = plain()
    model, _ = sharded(stage=stage, groups=3, bucket_bytes=None)
    assert_same(expected, model)
    model = make_model()
    opt = distribute(
        model,
        adamw(model.parameters()),
        groups=[list(model.up.parameters()), [model.scale]],
        stage=stage,
    )
    train(model, opt)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_names_it_works_too(stage):
    expected, _ = plain()
    model = make_model()
    train(model, opt := zero.DistributedOptimizer(adamw(model.parameters()), stage=stage))
    assert_same(expected, model)
    assert "group0.0" in str(opt.sections[0].layout.params)


@pytest.mark.parametrize("stage", STAGES)
def test_zeroify_gives_all_ranks_the_first_ranks_weights(stage):
    expected, _ = plain()
    model = make_model(seed=hvd.rank())
    same, opt = zero.zeroify(model, adamw(model.parameters()), stage=stage, bucket_bytes=999)
    assert same is model
    train(model, opt)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_non_contiguous_parameters(stage):
    class Transposed(MatricesOnly):
        def __init__(self):
            super().__init__()
            weight = self.body[1].weight
            weight.data = weight.data.t().contiguous().t()
            assert not weight.is_contiguous()

    expected, _ = plain(cls=MatricesOnly)  # Horovod's own optimizer does not take the other
    model, _ = sharded(cls=Transposed, stage=stage)
    assert_same(expected, model, exact=False)


@pytest.mark.parametrize("stage", STAGES)
def test_several_dtypes_in_one_model(stage):
    class Mixed(MatricesOnly):
        def __init__(self):
            super().__init__()
            self.body[1].double()

        def forward(self, tokens):
            x = self.body[1](self.body[0](tokens).double())
            return self.body[2](x.float())

    expected, _ = plain(cls=Mixed)
    model, opt = sharded(cls=Mixed, stage=stage)
    assert {b.dtype for s in opt.sections for b in s.layout.buckets} == {"float32", "float64"}
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_sparse_embedding_gradients_give_the_dense_result(stage):
    class Sparse(MatricesOnly):
        def __init__(self):
            super().__init__()
            self.body[0].sparse = True

    expected, _ = plain(cls=MatricesOnly)
    model, _ = sharded(cls=Sparse, stage=stage)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_the_native_reducescatter_gives_the_same(stage):
    """The one used on GPUs, over MPI here."""
    if hvd.size() == 1:
        return
    from zerohvd.torch.communication.collectives import TorchCollectives

    expected, _ = plain()
    model = make_model()
    opt = distribute(model, adamw(model.parameters()), stage=stage, bucket_bytes=1024)
    assert isinstance(opt.collectives, TorchCollectives)
    opt.collectives._native = True
    train(model, opt)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_state_that_the_optimizer_brings_along_is_kept(stage):
    """Adagrad's accumulators, which hvd.DistributedOptimizer forgets."""

    def run(wrap):
        model = make_model(cls=MatricesOnly)
        opt = wrap(model, O.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.5))
        for step in range(3):
            opt.zero_grad()
            loss_of(model, batch(step, rank=0)).backward()
            opt.step()
        return model

    alone = run(lambda _, opt: opt)
    model = run(lambda model, opt: distribute(model, opt, stage=stage, bucket_bytes=200))
    assert_same(alone, model, exact=hvd.size() in (1, 2, 4))
