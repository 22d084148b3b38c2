"""Ranks on several hosts train as on one: what travels in two steps is the same."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from training import (
    STAGES,
    assert_replicated,
    assert_same,
    batch,
    distribute,
    loss_of,
    make_model,
    plain,
    sharded,
)

import zerohvd.torch as zero
from zerohvd.torch.communication.collectives import TorchCollectives

RANKS = (4,)


class WideNet(nn.Module):
    """With parameters that are large enough for two steps: small messages take one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 4099)
        self.down = nn.Linear(4099, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.embed(tokens))))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("lengths", [[50000] * 4, [30001, 0, 70000, 1], [0, 0, 0, 40000]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_are_added_up_and_gathered(two_hosts, dtype, lengths):
    c = TorchCollectives()
    assert c.find_hosts() == ["host0", "host1", "host0", "host1"]
    total = sum(lengths)
    x = (torch.arange(total) % 13 + c.rank).to(dtype)
    exchange = c.exchange_start(x, lengths, name="x")
    exchange.handle.wait()
    mine = sum(part.float() for part in exchange.parts)
    start = sum(lengths[: c.rank])
    expected = (torch.arange(total) % 13 * 4 + 6).float()
    assert len(exchange.parts) == 2 and torch.equal(mine, expected[start : start + len(mine)])
    out = torch.full((total,), -1.0).to(dtype)
    out[start : start + len(mine)] = mine.to(dtype)
    handle = c.gather_start(out, lengths, name="out")
    while not handle.done():
        pass
    handle.wait()
    assert torch.equal(out.float(), expected)
    into = torch.empty(total, dtype=dtype)
    c.gather_into(into, mine.to(dtype), lengths, name="into").wait()
    assert torch.equal(into.float(), expected)


PACKED = {"compression": zero.Compression.int8, "param_compression": zero.Compression.int8}


@pytest.mark.parametrize(
    "options", [{}, {"compression": zero.Compression.fp16}, PACKED], ids=["", "fp16", "int8"]
)
@pytest.mark.parametrize("stage", STAGES)
def test_training_is_that_of_one_host(two_hosts, stage, options):
    if stage == 0 and options is PACKED:
        return
    expected, _ = plain(sgd, cls=WideNet)
    model, _ = sharded(sgd, cls=WideNet, stage=stage, **options)
    assert_same(expected, model, exact=False, tol=5e-3 if options else 1e-5)
    assert_replicated(model)


@pytest.mark.parametrize("stage", STAGES)
def test_a_users_collective_between_backward_and_step(two_hosts, stage):
    model = make_model(cls=WideNet)
    opt = distribute(model, sgd(model.parameters()), stage=stage, bucket_bytes=1 << 17)
    for step in range(3):
        opt.zero_grad()
        loss = loss_of(model, batch(step, hvd.rank()))
        loss.backward()
        hvd.allreduce(loss.detach(), name="loss")
        opt.step()
    expected, _ = plain(sgd, cls=WideNet, steps=3)
    assert_same(expected, model, exact=False)


def test_rank_0_saves_alone(two_hosts):
    _, opt = sharded(sgd, cls=WideNet, stage=2)
    expected = opt.state_dict()
    if hvd.rank() == 0:
        alone = opt.state_dict()
        torch.testing.assert_close(alone["state"], expected["state"], rtol=0, atol=0)
    hvd.allreduce(torch.zeros(1), name="others wait here")
