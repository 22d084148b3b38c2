"""Sharding inside a subset of the ranks."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from training import STAGES, adamw, assert_same, batch, distribute, loss_of, make_model

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
