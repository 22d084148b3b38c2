"""Stage 3: torch.func, parameters of the user's classes, blocks that ranks leave differently."""

from __future__ import annotations

import contextlib

import horovod.torch as hvd
import pytest
import torch
from test_torch_stage3_units import DIM, Block, Blocks, assert_trains_like_stage_2, needs_ranks
from test_torch_stage3_values import three
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap
from torch.nn import functional as F
from training import adamw, assert_replicated, assert_same, batch, make_model, train

import zerohvd.torch as zero

RANKS = (2, 3)  # two are bitwise, three have other sums

# -- torch.func ------------------------------------------------------------------------------------


def loss_of(model, params, inputs, targets):
    out = functional_call(model, params, (inputs,))
    return F.cross_entropy(out.flatten(0, -2), targets.flatten())


def gradients(model, params):
    return grad(lambda p: loss_of(model, p, *batch(0, hvd.rank())))(params)


def gradients_by_vjp(model, params):
    _, pull = vjp(lambda p: loss_of(model, p, *batch(0, hvd.rank())), params)
    return pull(torch.ones(()))[0]


def gradients_per_sample(model, params):
    per_sample = grad(lambda p, x, y: loss_of(model, p, x, y))
    return vmap(per_sample, in_dims=(None, 0, 0))(params, *batch(0, hvd.rank()))


def tensors_of(found):
    return list(found.values()) if isinstance(found, dict) else [found]


def assert_close(found, expected):
    for a, b in zip(tensors_of(found), tensors_of(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [gradients, gradients_by_vjp, gradients_per_sample])
@pytest.mark.parametrize("whose", ["own", "detached", "the model's"])
def test_gradients_of_given_parameters(way, whose):
    """One's own anywhere, the model's while they are gathered."""
    model, opt = three()
    plain = make_model(cls=Blocks)
    expected = way(plain, {k: v.detach() for k, v in plain.named_parameters()})
    if whose == "own":
        own = {k: v.detach().clone() for k, v in plain.named_parameters()}
        assert_close(way(model, own), expected)
    else:
        with zero.gathered(model):
            params = dict(model.named_parameters())
            if whose == "detached":
                params = {k: v.detach() for k, v in params.items()}
            assert_close(way(model, params), expected)
    train(model, opt, steps=1)
    assert zero.memory_report(opt)["buffers"] == 0
    assert_replicated(model)


OF_INPUTS = {
    "grad": lambda f, x: grad(lambda e: f(e).sum())(x),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: vmap(f)(x),
    "hessian": lambda f, x: hessian(lambda e: f(e).sum())(x[0]),
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(lambda e: f(e).sum(0), x),
}


@pytest.mark.parametrize("way", OF_INPUTS.values(), ids=OF_INPUTS)
def test_derivatives_of_inputs(way):
    model, opt = three()
    plain = make_model(cls=Blocks)
    x = torch.linspace(-1, 1, 2 * DIM).view(2, DIM)
    found = way(lambda e: model.head(model.body(e)), x)
    assert_close(found, way(lambda e: plain.head(plain.body(e)), x))
    train(model, opt, steps=1)
    assert zero.memory_report(opt)["buffers"] == 0


@needs_ranks
@pytest.mark.parametrize("detached", [True, False])
def test_transforms_of_sharded_parameters_are_an_error_that_says_what_to_do(detached):
    model, opt = three()
    params = dict(model.named_parameters())
    if detached:
        params = {k: v.detach() for k, v in params.items()}
    with pytest.raises(zero.ShardedStateError, match=r"torch\.func.*with zero\.gathered"):
        gradients(model, params)
    train(model, opt, steps=1)


def test_the_models_own_parameters_may_be_given_to_functional_call():
    model, _ = three()
    inputs, _ = batch(0, hvd.rank())
    found = functional_call(model, dict(model.named_parameters()), (inputs,))
    assert torch.equal(found, make_model(cls=Blocks)(inputs))


# -- parameters of the user's classes --------------------------------------------------------------


class Marked(nn.Parameter):
    """With attributes, as frameworks for tensor parallelism have them."""

    @property
    def is_marked(self):
        return True


class WithMarks(Blocks):
    def __init__(self):
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.up.weight = Marked(block.up.weight.detach().clone())
            block.up.weight.number = number


def test_parameters_keep_their_class_and_attributes():
    def check(model):
        for number, block in enumerate(model.blocks):
            weight = block.up.weight
            assert isinstance(weight, Marked) and isinstance(weight, nn.Parameter)
            assert weight.is_marked and weight.number == number
            assert not isinstance(block.down.weight, Marked)

    model, opt = assert_trains_like_stage_2(WithMarks)
    check(model)
    with zero.gathered(model):
        check(model)
        assert all(type(block.up.weight) is Marked for block in model.blocks)
        kept = model.blocks[0].up.weight[0]
    check(model)
    train(model, opt, steps=1)
    assert kept.sum().isfinite()
    if hvd.size() > 1:
        assert "sharded" in repr(model.blocks[1].up.weight)
        with pytest.raises(zero.ShardedStateError, match=r"blocks\.1\.up"):
            model.blocks[1].up.weight.sum()


def test_deferred_parameters_keep_their_class_too(monkeypatch):
    monkeypatch.setattr("zerohvd.torch.stage3.deferred.REAL_BELOW", 20)
    with zero.deferred_init():
        model = WithMarks()
    model, _ = zero.zeroify(model, adamw(model.parameters()), stage=3)
    assert isinstance(model.blocks[3].up.weight, Marked) and model.blocks[3].up.weight.number == 3


# -- blocks that ranks leave differently -----------------------------------------------------------


@needs_ranks
@pytest.mark.parametrize("writable", [True, False])
def test_gathered_on_one_rank_while_the_others_train_is_an_error_on_all(writable):
    model, opt = three()
    with pytest.raises(zero.DisagreementError, match=r"rank 0 zero\.gathered\(\).*step\(\)"):
        if hvd.rank() == 0:
            with zero.gathered(model, writable=writable):
                pass
        train(model, opt, steps=1)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("writable", [True, False])
def test_an_error_inside_on_one_rank_stops_all_and_nothing_is_written(stage, writable):
    model = make_model(cls=Blocks)
    options = {"persist_below": 4} if stage == 3 else {}
    model, opt = zero.zeroify(model, adamw(model.parameters()), stage=stage, **options)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    others = zero.DisagreementError if stage == 3 or writable else ()
    expected = KeyError if hvd.rank() == 0 else others
    raised = pytest.raises(expected) if expected else contextlib.nullcontext()
    with raised, zero.gathered(model, writable=writable):
        if writable:
            for p in model.parameters():
                p.fill_(3.0)
        if hvd.rank() == 0:
            raise KeyError("on the first rank")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    train(model, opt, steps=1)
    assert_replicated(model)


@needs_ranks
def test_others_may_be_in_the_middle_of_a_pass_when_one_rank_fails():
    model, opt = three()
    expected = KeyError if hvd.rank() == 0 else zero.DisagreementError
    with pytest.raises(expected), zero.gathered(model.embed):
        if hvd.rank() == 0:
            raise KeyError("before its pass")
        with torch.no_grad():
            model(batch(0, hvd.rank())[0])
    train(model, opt, steps=1)
    assert_replicated(model)


@needs_ranks
def test_a_rank_that_is_not_there_cannot_be_written_from():
    model, _ = three()
    wrong = pytest.raises(ValueError, match=f"from_rank is {hvd.size()}.* 0 to {hvd.size() - 1}")
    with wrong, zero.gathered(model, writable=True, from_rank=hvd.size()):
        pass


def test_a_penalty_on_gathered_weights_counts():
    """Inside the block, where the backward pass still finds the weights."""

    def step(model, number):
        inputs, targets = batch(number, hvd.rank())
        with zero.gathered(model):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
            loss.backward()

    assert_trains_like_stage_2(step=step, units=(Block, nn.Embedding))


def test_gathering_between_the_passes_of_one_step():
    two, opt_two, three_, opt_three = (
        *zero.zeroify(*made(), stage=2, backward_passes_per_step=2),
        *zero.zeroify(*made(), stage=3, backward_passes_per_step=2, persist_below=4),
    )
    for number in range(2):
        for model, opt in ((two, opt_two), (three_, opt_three)):
            opt.zero_grad()
            for part in range(2):
                inputs, targets = batch(2 * number + part, hvd.rank())
                F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
                with zero.gathered(model):
                    assert model.blocks[0].up.weight.norm() > 0
            opt.step()
    assert_same(two, three_)


def made():
    model = make_model(cls=Blocks)
    return model, adamw(model.parameters())
