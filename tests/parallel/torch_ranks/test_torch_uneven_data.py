"""Ranks with unequal batches learn what one process learns from all samples."""

from __future__ import annotations

import math

import horovod.torch as hvd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from training import (
    STAGES,
    MatrixNet,
    assert_replicated,
    assert_same,
    batch,
    distribute,
    loss_of,
    make_model,
)

import zerohvd.torch as zero

RANKS = (1, 2, 3)  # four have the same sums as three


def sgd(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def samples_of(step, rank):
    """Rank 0 has none in the second step."""
    return 0 if step == 1 and rank == 0 else 1 + (3 * rank + step) % 5


def on_all_samples(steps=3, clip=lambda model: None):
    model = make_model(cls=MatrixNet)
    opt = sgd(model.parameters())
    for step in range(steps):
        parts = [batch(step, r, samples_of(step, r)) for r in range(hvd.size())]
        if not sum(len(p[0]) for p in parts):
            continue
        opt.zero_grad()
        loss_of(model, tuple(torch.cat(t) for t in zip(*parts, strict=True))).backward()
        clip(model)
        opt.step()
    return model


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["call", "with", "step"])
def test_weights_give_the_result_of_the_union(way, stage):
    if hvd.size() == 1:
        return  # alone, and without a sample in the second step
    model = make_model(cls=MatrixNet)
    opt = distribute(model, sgd(model.parameters()), stage=stage, bucket_bytes=300)
    for step in range(3):
        opt.zero_grad()
        count = samples_of(step, hvd.rank())
        data = batch(step, hvd.rank(), count)
        if way == "call":
            zero.weight(count)
            if count:
                loss_of(model, data).backward()
            opt.step()
        elif way == "with":
            with zero.weight(count):
                if count:
                    loss_of(model, data).backward()
            opt.step()
        else:
            if count:
                with opt.no_sync():
                    loss_of(model, data).backward()
            opt.step(weight=count)
    assert_same(on_all_samples(), model, exact=False)
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_torchs_clipping_works_on_a_rank_without_a_batch(stage):
    if hvd.size() == 1:
        return

    def clip(model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    model = make_model(cls=MatrixNet)
    opt = distribute(model, sgd(model.parameters()), stage=stage, bucket_bytes=300)
    for step in range(3):
        model.zero_grad()
        count = samples_of(step, hvd.rank())
        zero.weight(count)
        if count:
            loss_of(model, batch(step, hvd.rank(), count)).backward()
        clip(model)
        opt.step()
    assert_same(on_all_samples(clip=clip), model, exact=False)
    assert_replicated(model)


def test_a_weight_after_gradients_have_left_is_refused():
    model = make_model(cls=MatrixNet)
    opt = zero.DistributedOptimizer(sgd(model.parameters()), stage=2)
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(ValueError, match=r"zero\.weight\(n\) before the backward"):
        opt.step(weight=3)
    opt.step()


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_a_weight_is_a_number_of_samples(value):
    with pytest.raises(ValueError, match="number >= 0"):
        zero.weight(value)


def test_weights_on_some_ranks_only_are_an_error_on_all():
    if hvd.size() == 1:
        return
    model = make_model(cls=MatrixNet)
    opt = zero.DistributedOptimizer(sgd(model.parameters()), stage=2)
    if hvd.rank() == 0:
        zero.weight(2)
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(zero.DisagreementError, match="gave a weight"):
        opt.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_optimizers_over_one_backward_pass_use_the_weight(stage):
    model = make_model(cls=MatrixNet)
    body = [*model.embed.parameters(), *model.up.parameters()]
    opts = [
        zero.DistributedOptimizer(sgd(part), stage=stage, bucket_bytes=300)
        for part in (body, list(model.head.parameters()))
    ]
    for step in range(3):
        count = samples_of(step, hvd.rank()) if hvd.size() > 1 else samples_of(step, 1)
        for opt in opts:
            opt.zero_grad()
        zero.weight(count)
        if count:
            loss_of(model, batch(step, hvd.rank(), count)).backward()
        for opt in opts:
            opt.step()
    if hvd.size() > 1:
        assert_same(on_all_samples(), model, exact=False)
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_the_weight_of_a_step_that_failed_is_used_up(stage):
    model = make_model(cls=MatrixNet)
    opt = distribute(model, sgd(model.parameters()), stage=stage)
    zero.weight(0)
    with pytest.raises(ValueError, match="weight 0"):
        opt.step()
    zero.weight(1 + 5 * hvd.rank())
    with pytest.raises(KeyError):
        opt.step(lambda: {}["no such loss"])
    opt.zero_grad()
    expected = make_model(cls=MatrixNet)
    theirs = hvd.DistributedOptimizer(
        sgd(expected.parameters()), named_parameters=expected.named_parameters()
    )
    other = make_model(cls=MatrixNet)
    new = distribute(other, sgd(other.parameters()), stage=stage)
    for net, each in ((expected, theirs), (model, opt), (other, new)):
        loss_of(net, batch(0, hvd.rank())).backward()
        each.step()
    assert_same(expected, model, exact=False, tol=1e-7)
    assert_same(expected, other, exact=False, tol=1e-7)


def test_no_samples_at_all_is_an_error_on_all():
    model = make_model(cls=MatrixNet)
    opt = zero.DistributedOptimizer(sgd(model.parameters()), stage=2)
    zero.weight(0)
    with pytest.raises(ValueError, match="weight 0"):
        opt.step()


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 10, 16])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_sampler_gives_every_sample_once(samples, shuffle):
    sampler = zero.DistributedSampler(range(samples), shuffle=shuffle)
    sampler.set_epoch(3)
    mine = torch.tensor(list(sampler), dtype=torch.int64)
    assert len(mine) == len(sampler) <= sampler.largest_share
    everyone = hvd.allgather(mine, name="sampled")
    assert sorted(everyone.tolist()) == list(range(samples))


def test_the_sampler_shuffles_anew_in_every_epoch():
    sampler = zero.DistributedSampler(range(1000))
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("samples", [1, 5, 9, 13])
def test_an_epoch_over_an_uneven_dataset(samples, stage):
    """Full-batch steps: the union of each step's samples is known."""
    tokens, targets = batch(7, 0, samples)
    data = TensorDataset(tokens, targets)
    model = make_model(cls=MatrixNet)
    opt = distribute(model, sgd(model.parameters()), stage=stage, bucket_bytes=300)
    sampler = zero.DistributedSampler(data, shuffle=False)
    steps = 0
    for part in zero.even_steps(DataLoader(data, batch_size=2, sampler=sampler)):
        opt.zero_grad()
        zero.weight(0 if part is None else len(part[0]))
        if part is not None:
            loss_of(model, part).backward()
        opt.step()
        steps += 1
    assert steps == math.ceil(math.ceil(samples / hvd.size()) / 2)

    alone = make_model(cls=MatrixNet)
    plain = sgd(alone.parameters())
    for first in range(0, samples, 2 * hvd.size()):
        plain.zero_grad()
        end = first + 2 * hvd.size()
        loss_of(alone, (tokens[first:end], targets[first:end])).backward()
        plain.step()
    assert_same(alone, model, exact=False)
