"""Rank 0 saves, rank 0 restores: the habits of every Horovod script."""

from __future__ import annotations

import copy
import gc
import time
import weakref

import horovod.torch as hvd
import pytest
import torch
from training import (
    STAGES,
    adamw,
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
from zerohvd.peers import group

RANKS = (1, 2, 3)  # waits of seconds

needs_ranks = pytest.mark.skipif(hvd.size() == 1, reason="needs several ranks")


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    """A test waits less long than a user for ranks that do not come."""
    monkeypatch.setattr(group, "PATIENCE", 0.3)


def assert_equal_states(a, b):
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for index, values in a["state"].items():
        assert values.keys() == b["state"][index].keys()
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["state"][index][key]))


def saved_on_the_way():
    """A plain model after eight steps, and what was saved of it and its optimizer after three."""
    model, opt = plain(steps=3)
    stored = copy.deepcopy([model.state_dict(), opt.state_dict()])
    train(model, opt, first=3)
    return model, stored


def in_the_next_step(model, opt):
    train(model, opt, steps=1, first=5)


def in_an_allreduce(model, opt):
    hvd.allreduce(torch.ones(3), name="of the user")


def at_a_barrier(model, opt):
    hvd.barrier()


@needs_ranks
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("elsewhere", [in_the_next_step, in_an_allreduce, at_a_barrier])
def test_rank_0_saves_while_the_others_go_on(stage, elsewhere, shared_folder):
    model, opt = sharded(stage=stage)
    together = {"model": model.state_dict(), "opt": opt.state_dict()}
    if hvd.rank() == 0:
        path = shared_folder / "checkpoint.pt"
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
        saved = torch.load(path)
        assert_equal_states(saved["opt"], together["opt"])
        assert all(torch.equal(saved["model"][k], v) for k, v in together["model"].items())
    elsewhere(model, opt)
    train(model, opt, steps=1, first=6)


@needs_ranks
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("partition", ["flat", "parameter"])
def test_any_rank_may_ask_alone(stage, partition):
    model, opt = sharded(stage=stage, partition=partition)
    together = opt.state_dict()
    if hvd.rank() == hvd.size() - 1:
        assert_equal_states(opt.state_dict(), together)
    train(model, opt, steps=1)


@needs_ranks
def test_masters_and_16_bit_models_are_saved_by_one_rank():
    model = make_model().to(torch.bfloat16)
    opt = distribute(model, adamw(model.parameters()), stage=3)
    train(model, opt)
    together = model.state_dict()
    if hvd.rank() == 0:
        alone = model.state_dict()
        assert all(torch.equal(alone[k], v) for k, v in together.items())
        assert all(v.dtype == together[k].dtype for k, v in alone.items())
    train(model, opt)


@needs_ranks
def test_ranks_that_come_late_get_the_state_too():
    model, opt = sharded(stage=2)
    together = opt.state_dict()
    if hvd.rank() == 0:
        late = opt.state_dict()
        hvd.barrier()
    else:
        hvd.barrier()
        late = opt.state_dict()
    assert_equal_states(late, together)
    hvd.barrier()
    train(model, opt, steps=1)


@pytest.mark.parametrize("stage", STAGES)
def test_rank_0_restores_and_broadcasts(stage):
    """As in Horovod's ImageNet example: the others have made a fresh model and optimizer."""
    expected, stored = saved_on_the_way()
    model = make_model(seed=hvd.rank())
    inner = torch.optim.AdamW(model.parameters(), lr=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    opt = distribute(model, inner, stage=stage)
    if hvd.rank() == 0:
        model.load_state_dict(stored[0])
        opt.load_state_dict(stored[1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    train(model, opt, first=3)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_rank_0_restores_before_wrapping(stage):
    expected, stored = saved_on_the_way()
    model = make_model(seed=hvd.rank())
    inner = adamw(model.parameters())
    if hvd.rank() == 0:
        model.load_state_dict(stored[0])
        inner.load_state_dict(stored[1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    opt = distribute(model, inner, stage=stage)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    train(model, opt, first=3)
    assert_same(expected, model)


@needs_ranks
@pytest.mark.parametrize("stage", STAGES)
def test_what_rank_0_alone_has_restored_is_not_trained_on(stage):
    _, source = sharded(stage=stage)
    stored = source.state_dict()
    model, opt = sharded(stage=stage)
    if hvd.rank() == 0:
        opt.load_state_dict(stored)
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(zero.DisagreementError, match="broadcast_optimizer_state"):
        opt.step()


def test_rank_0_restores_a_model_that_is_too_small_to_be_sharded():
    """With the defaults of stage 3 its parameters stay whole on every rank."""
    expected, stored = saved_on_the_way()
    model = make_model(seed=hvd.rank())
    model, opt = zero.zeroify(model, adamw(model.parameters()), stage=3)
    if hvd.rank() == 0:
        model.load_state_dict(stored[0])
        opt.load_state_dict(stored[1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    train(model, opt, first=3)
    assert_same(expected, model)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_is_deleted_frees_its_state_at_once(stage):
    """Not when the garbage collector runs: tensors do not make it run."""
    model, opt = sharded(stage=stage, steps=1)
    inner = weakref.ref(opt.inner)
    gc.collect()
    gc.disable()
    try:
        del opt
        hvd.barrier()
        deadline = time.monotonic() + 5.0  # others ask the first rank whether it has let go too
        while inner() is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert inner() is None
    finally:
        gc.enable()
    hvd.barrier()
    assert model.state_dict()  # all ranks together
