"""hvd.broadcast_parameters, as scripts for Horovod call it."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from test_torch_stage3_units import Blocks, needs_ranks
from training import STAGES, adamw, assert_replicated, assert_same, make_model, train

import zerohvd.torch as zero

RANKS = (1, 2, 3)  # two are bitwise, three have other sums

WAYS = {
    "state_dict": lambda model: model.state_dict(),
    "named_parameters": lambda model: list(model.named_parameters()),
    "dict": lambda model: dict(model.named_parameters()),
    "parameters": lambda model: list(model.parameters()),
}
LIKE_HOROVOD = ("state_dict", "named_parameters", "dict")


def narrow(dtype):
    return lambda: Blocks().to(dtype)


def zeroified(model, stage, **options):
    options = {"persist_below": 4, **options} if stage == 3 else options
    return zero.zeroify(model, adamw(model.parameters()), stage=stage, **options)


@pytest.mark.parametrize("way", LIKE_HOROVOD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("stage", STAGES)
def test_before_the_model_is_sharded(stage, dtype, way):
    model = make_model(seed=hvd.rank(), cls=narrow(dtype))
    hvd.broadcast_parameters(WAYS[way](model), root_rank=0)
    model, opt = zeroified(model, stage)
    train(model, opt, steps=2)
    expected, plain = zeroified(make_model(cls=narrow(dtype)), stage)
    train(expected, plain, steps=2)
    assert_same(expected, model, exact=stage > 0 or hvd.size() <= 2)


@pytest.mark.parametrize("way", LIKE_HOROVOD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_the_first_rank_has_restored_reaches_all_and_is_trained_on(stage, dtype, way):
    """After sharding and some steps: masters and shards of all ranks follow."""
    restored = make_model(seed=5, cls=narrow(dtype)).state_dict()

    def restore(everywhere):
        model, opt = zeroified(make_model(cls=narrow(dtype)), stage)
        train(model, opt, steps=2)
        if everywhere or hvd.rank() == 0:
            model.load_state_dict(restored)
        if not everywhere:
            hvd.broadcast_parameters(WAYS[way](model), root_rank=0)
        for key, value in model.state_dict().items():
            assert torch.equal(value, restored[key])
        train(model, opt, steps=3)
        assert_replicated(model)
        return model

    assert_same(restore(True), restore(False), exact=stage > 0 or hvd.size() <= 2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_narrow_masters_are_those_of_the_restored_values(stage):
    """A step of almost no size leaves the parameters as they were restored."""
    model = make_model(cls=narrow(torch.float16))
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    model, opt = zero.zeroify(model, inner, stage=stage)
    train(model, opt, steps=2)
    opt.param_groups[0]["lr"] = 1e-12
    restored = make_model(seed=5, cls=narrow(torch.float16))
    if hvd.rank() == 0:
        model.load_state_dict(restored.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, opt, steps=1)
    assert_same(restored, model, exact=True)


def test_of_gathered_copies_it_changes_nothing_at_stage_3():
    model, opt = zeroified(make_model(cls=Blocks), 3)
    train(model, opt, steps=1)
    before = model.state_dict()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    train(model, opt, steps=1)
    assert_replicated(model)


@needs_ranks
@pytest.mark.parametrize("way", ["named_parameters", "dict", "parameters"])
def test_of_sharded_parameters_it_is_an_error_that_says_what_to_do(way):
    model, opt = zeroified(make_model(cls=Blocks), 3, persist_below=0)
    with pytest.raises(zero.ShardedStateError, match=r"broadcast_parameters\(\): leave it out"):
        hvd.broadcast_parameters(WAYS[way](model), root_rank=0)
    train(model, opt, steps=1)
    assert_replicated(model)


def test_what_the_first_rank_has_restored_reaches_all_shards_at_stage_3():
    """By the copies: the call of state_dict() on every rank gives them what was loaded."""
    restored = make_model(seed=5, cls=Blocks)
    model, opt = zeroified(make_model(cls=Blocks), 3)
    train(model, opt, steps=1)
    if hvd.rank() == 0:
        model.load_state_dict(restored.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_same(restored, model, exact=True)
    train(model, opt, steps=1)
    assert_replicated(model)


def test_it_may_be_called_while_the_parameters_are_gathered():
    model, opt = zeroified(make_model(cls=Blocks), 3)
    with zero.gathered(model, writable=True):
        if hvd.rank() == 0:
            for p in model.parameters():
                p.mul_(2.0)
        hvd.broadcast_parameters(dict(model.named_parameters()), root_rank=0)
    plain = make_model(cls=Blocks)
    assert torch.equal(model.state_dict()["embed.weight"], 2 * plain.embed.weight)
    train(model, opt, steps=1)
    assert_replicated(model)
