"""Sharding inside a subset of the ranks."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from training import STAGES, Net, adamw, assert_same, batch, distribute, loss_of, make_model

import zerohvd.torch as zero


@pytest.mark.parametrize("stage", STAGES)
def test_only_the_members_share_a_model(stage, members):
    model = make_model()
    opt = distribute(
        model, adamw(model.parameters()), stage=stage, process_set=members, bucket_bytes=500
    )
    included = members.included()
    assert opt.collectives.size == (members.size() if included else 1)
    for step in range(4):
        opt.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        opt.step()

    group = members.ranks if included else [hvd.rank()]
    alone = make_model()
    plain = adamw(alone.parameters())
    for step in range(4):
        plain.zero_grad()
        parts = [batch(step, r) for r in group]
        loss_of(alone, tuple(torch.cat(t) for t in zip(*parts, strict=True))).backward()
        for p in alone.parameters():
            if len(group) > 1 and p.grad is None:
                p.grad = torch.zeros_like(p)
        plain.step()
    assert_same(alone, model, exact=False)


def test_zeroify_broadcasts_among_the_members(members):
    model = make_model(seed=hvd.rank())
    zero.zeroify(model, adamw(model.parameters()), process_set=members)
    first = members.ranks[0] if members.included() else hvd.rank()
    assert_same(make_model(seed=first), model, exact=True)


def first_of(members):
    """The rank whose values the members get, and every other rank its own."""
    return members.ranks[0] if members.included() else hvd.rank()


def made(stage, members, **options):
    """A model that starts with other values on every rank, one parameter of it frozen."""
    model = make_model(seed=hvd.rank())
    model.scale.requires_grad_(False)
    inner = adamw([p for p in model.parameters() if p.requires_grad])
    return zero.zeroify(model, inner, stage=stage, process_set=members, **options)


@pytest.mark.parametrize("stage", STAGES)
def test_zeroify_gives_the_members_the_values_of_the_first_of_them(stage, members):
    model, _ = made(stage, members)
    assert_same(make_model(seed=first_of(members)), model, exact=True)


def test_deferred_models_get_the_values_of_the_first_member(members, monkeypatch):
    monkeypatch.setattr("zerohvd.torch.stage3.deferred.REAL_BELOW", 20)
    torch.manual_seed(hvd.rank())
    with zero.deferred_init():
        model = Net()
    model, _ = zero.zeroify(
        model, adamw(model.parameters()), stage=3, process_set=members, persist_below=3
    )
    assert_same(make_model(seed=first_of(members)), model, exact=True)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_written_is_that_of_the_first_member(stage, members):
    model, _ = made(stage, members, **({"persist_below": 20} if stage == 3 else {}))
    with zero.gathered(model, writable=True):
        for p in model.parameters():
            p.fill_(hvd.rank() + 1.0)
    with zero.gathered(model):
        for p in model.parameters():
            assert (p == first_of(members) + 1.0).all()
    if members.included():  # the others may do something else
        last = members.size() - 1
        with zero.gathered([model.scale, model.up.bias], writable=True, from_rank=last):
            model.scale.fill_(hvd.rank() + 20.0)
        assert model.scale.item() == members.ranks[-1] + 20.0


@pytest.mark.parametrize("stage", STAGES)
def test_the_state_of_the_members_goes_both_ways(stage, members):
    model, opt = made(stage, members)
    if members.included():
        state = model.state_dict()
        for key, value in make_model(first_of(members)).state_dict().items():
            assert torch.equal(state[key], value)
        model.load_state_dict(make_model(seed=9).state_dict())
        assert_same(make_model(seed=9), model, exact=True)
        loss_of(model, batch(0, hvd.rank())).backward()
        opt.step()
        opt.load_state_dict(opt.state_dict())
        loss_of(model, batch(1, hvd.rank())).backward()
        opt.step()


@pytest.mark.parametrize("stage", STAGES)
def test_the_members_save_and_load(stage, members, shared_folder):
    """And every other rank what is its own, elsewhere."""
    folder = shared_folder / ("members" if members.included() else f"rank{hvd.rank()}")
    model, opt = made(stage, members)
    loss_of(model, batch(0, hvd.rank())).backward()
    opt.step()
    zero.save(folder, model, opt)
    again, opt_again = made(stage, members)
    zero.load(folder, again, opt_again)
    for m, o in ((model, opt), (again, opt_again)):
        o.zero_grad()
        loss_of(m, batch(1, hvd.rank())).backward()
        o.step()
    assert_same(model, again, exact=True)
    zero.save(folder, model)
    zero.load(folder, again)
    assert_same(model, again, exact=True)
