"""What can be proven of devices without one: nothing is made on a device that nobody asked for, and
bfloat16 can travel as NCCL wants it."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

import zerohvd.torch as zero
from zerohvd.torch.communication import arrays


def make(stage, dtype=torch.float32):
    torch.manual_seed(0)
    kwargs = {"device": "cpu", "dtype": dtype}
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 17, **kwargs), torch.nn.Tanh(), torch.nn.Linear(17, 3, **kwargs)
    )
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return zero.zeroify(model, opt, stage=stage)


def train(model, opt, steps=3):
    for step in range(steps):
        generator = torch.Generator("cpu").manual_seed(10 * step + hvd.rank())
        x = torch.randn(4, 5, generator=generator, device="cpu")
        loss = (model(x.to(next(iter(opt.named)).dtype)) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    return [v for _, v in sorted(zero_values(model).items())]


def zero_values(model):
    with zero.gathered(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tensors_are_made_where_the_parameters_are_whatever_the_default_device(
    stage, shared_folder
):
    """The meta device has no values: whatever is made there by accident raises or shows."""
    expected = train(*make(stage))
    with torch.device("meta"):
        model, opt = make(stage)
        assert all(map(torch.equal, train(model, opt), expected))
        zero.save(shared_folder / "c", model, opt)
        whole = opt.state_dict()
        other, other_opt = make(stage)
        zero.load(shared_folder / "c", other, other_opt)
        _, third_opt = make(stage)
        third_opt.load_state_dict(whole)
        sampler = zero.DistributedSampler(range(10), seed=1)
        assert len(list(sampler)) == len(sampler)
        found = train(other, other_opt), train(model, opt)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_travels_as_bytes_where_16_bit_integers_are_not_known(stage, monkeypatch):
    expected = train(*make(stage, torch.bfloat16))
    monkeypatch.setattr(arrays, "BYTES_ON", frozenset({"cpu"}))
    assert all(map(torch.equal, train(*make(stage, torch.bfloat16)), expected))


def test_collectives_of_bfloat16_as_bytes(monkeypatch):
    from zerohvd.torch.communication.collectives import join

    ranks = join()
    x = torch.arange(6.0, dtype=torch.bfloat16).reshape(3, 2) + hvd.rank()

    def all_of_them():
        return [
            ranks.allreduce(x, name="a"),
            ranks.allgather(x, name="b"),
            ranks.broadcast(x, hvd.size() - 1, name="c"),
            ranks.allreduce(x[0, 0], "max", name="d"),
        ]

    if hvd.size() == 1:
        return
    expected = all_of_them()
    monkeypatch.setattr(arrays, "BYTES_ON", frozenset({"cpu"}))
    for found, wanted in zip(all_of_them(), expected, strict=True):
        assert torch.equal(found, wanted)
