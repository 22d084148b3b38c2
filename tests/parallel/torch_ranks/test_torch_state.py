"""Optimizer state goes to and from the plain optimizer, at any size."""

from __future__ import annotations

import copy
import io

import horovod.torch as hvd
import pytest
import torch
from training import (
    STAGES,
    Net,
    adamw,
    assert_same,
    distribute,
    make_model,
    plain,
    sharded,
    train,
)

import zerohvd.torch as zero

MAKES = {
    "adamw": adamw,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def is_empty(value):
    return isinstance(value, torch.Tensor) and value.numel() == 0


def assert_states_equal(ours, theirs, *, exact):
    # What has no elements has no owner, and no state worth keeping.
    held = {i: v for i, v in theirs["state"].items() if not any(map(is_empty, v.values()))}
    assert ours["state"].keys() == held.keys()
    for index, values in held.items():
        mine = ours["state"][index]
        assert mine.keys() == values.keys(), index
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                assert mine[key].shape == value.shape, (index, key)
                assert mine[key].dtype == value.dtype, (index, key)
                tol = 0 if exact else 1e-4
                torch.testing.assert_close(mine[key], value, rtol=tol, atol=tol)
            else:
                assert mine[key] == value


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MAKES)
def test_state_dict_is_that_of_the_plain_optimizer(name, stage):
    _, theirs = plain(MAKES[name])
    _, opt = sharded(MAKES[name], stage=stage)
    ours = opt.state_dict()
    assert_states_equal(ours, theirs.state_dict(), exact=hvd.size() <= 2)
    assert ours["param_groups"] == theirs.state_dict()["param_groups"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("partition", ["flat", "parameter"])
def test_training_goes_on_with_the_plain_optimizer_and_back(partition, stage):
    expected, _ = plain(steps=9)
    model, opt = sharded(steps=3, stage=stage, partition=partition)
    state = opt.state_dict()

    middle = make_model()
    middle.load_state_dict(model.state_dict())
    theirs = hvd.DistributedOptimizer(
        adamw(middle.parameters()), named_parameters=middle.named_parameters()
    )
    theirs.load_state_dict(state)
    train(middle, theirs, steps=3, first=3)

    last = make_model()
    last.load_state_dict(middle.state_dict())
    opt = distribute(last, adamw(last.parameters()), stage=stage, bucket_bytes=333)
    opt.load_state_dict(theirs.state_dict())
    train(last, opt, steps=3, first=6)
    assert_same(expected, last)


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_whole_tensor_optimizers(stage):
    class NoEmpty(Net):
        def __init__(self):
            super().__init__()
            del self.nothing

    def make(params):
        return torch.optim.Adafactor(params, lr=1e-2)

    _, theirs = plain(make, cls=NoEmpty)
    _, opt = sharded(make, cls=NoEmpty, stage=stage)
    state = opt.state_dict()
    assert_states_equal(state, theirs.state_dict(), exact=hvd.size() <= 2)
    opt.load_state_dict(state)
    assert_states_equal(opt.state_dict(), state, exact=True)


@pytest.mark.parametrize("stage", STAGES)
def test_state_can_be_collected_on_one_rank_only(stage):
    _, opt = sharded(stage=stage)
    everywhere = opt.state_dict()
    for to in range(hvd.size()):
        state = opt.state_dict(to=to)
        if hvd.rank() == to:
            assert_states_equal(state, everywhere, exact=True)
        else:
            assert state["state"] == {}
        assert state["param_groups"] == everywhere["param_groups"]
    with pytest.raises(ValueError, match="to must be a rank"):
        opt.state_dict(to=hvd.size())


@pytest.mark.parametrize("stage", STAGES)
def test_saved_state_survives_torch_save(stage):
    model, opt = sharded(stage=stage)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other, again = sharded(steps=0, stage=stage)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(torch.load(file, weights_only=True))
    train(model, opt, first=5)
    train(other, again, first=5)
    assert_same(model, other, exact=True)


def test_state_loaded_before_wrapping_is_sharded():
    model, opt = sharded(stage=2)
    other = make_model()
    other.load_state_dict(model.state_dict())
    inner = adamw(other.parameters())
    inner.load_state_dict(opt.state_dict())
    again = zero.DistributedOptimizer(inner, stage=2, bucket_bytes=100)
    train(model, opt, first=5)
    train(other, again, first=5)
    assert_same(model, other, exact=True)


def test_state_of_another_model_is_refused_and_changes_nothing():
    _, opt = sharded(stage=2)
    before = opt.state_dict()
    other = copy.deepcopy(before)
    other["param_groups"][0]["params"].append(99)
    with pytest.raises(ValueError, match="parameter groups"):
        opt.load_state_dict(other)
    other = copy.deepcopy(before)
    first = next(iter(other["state"]))
    other["state"][first]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="has shape"):
        opt.load_state_dict(other)
    assert_states_equal(opt.state_dict(), before, exact=True)


def test_state_in_the_middle_of_accumulation():
    from training import batch, loss_of

    model = make_model()
    opt = zero.DistributedOptimizer(
        adamw(model.parameters()), backward_passes_per_step=2, bucket_bytes=500
    )
    loss_of(model, batch(0, hvd.rank())).backward()
    assert opt.state_dict()["state"] == {}
    loss_of(model, batch(1, hvd.rank())).backward()
    opt.step()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("trained", [0, 3])
def test_horovods_broadcast_of_the_state_does_what_it_does_with_horovod(trained, stage):
    """Before training it makes a step on zero gradients, weight decay included; so does ours.

    A rank on its own has no gradient to reduce, and leaves the parameters alone.
    """
    expected, plain_opt = plain(steps=trained)
    if hvd.size() > 1 or trained:
        hvd.broadcast_optimizer_state(plain_opt, root_rank=0)
    model, opt = sharded(stage=stage, steps=trained)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    for each, optimizer in ((expected, plain_opt), (model, opt)):
        train(each, optimizer, first=trained)
    assert_same(expected, model)


def test_horovods_elastic_state_is_refused():
    import horovod.torch.elastic as elastic

    model, opt = sharded(stage=2)
    with pytest.raises(zero.ShardedStateError, match=r"Write zero\.elastic\.TorchState"):
        elastic.TorchState(model=model, optimizer=opt)
