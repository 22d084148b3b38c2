"""A large weight that two modules use, such as an embedding tied to the head."""

from __future__ import annotations

import copy
import io

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import STAGES, assert_replicated, assert_same

import zerohvd.torch as zero

WORDS, WIDTH = 600, 512  # a little more than a megabyte


class Tied(nn.Module):
    """Long enough for the two uses to be far from each other."""

    def __init__(self, sparse=False, bias=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(3))
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


class HeadOnly(Tied):
    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens).detach()))


class EitherOne(Tied):
    """The first rank's loss knows the head only, the others' the embedding only."""

    def forward(self, tokens):
        x = self.embed(tokens)
        if hvd.rank() == 0:
            return self.head(self.body(x.detach()))
        x = self.body(x)
        return self.head(x).detach() + x.sum(-1, keepdim=True) * torch.linspace(0, 1, WORDS)


class EmbeddingTwice(Tied):
    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens) + self.embed(tokens.flip(0))))


class SparseEmbedding(Tied):
    def __init__(self):
        super().__init__(sparse=True)


class FewWords(Tied):
    """Each of them comes several times in a batch; one is padding."""

    def __init__(self):
        super().__init__()
        self.embed.padding_idx = 2
        self.embed.scale_grad_by_freq = True

    def forward(self, tokens):
        return super().forward(tokens % 4)


class HeadWithBias(Tied):
    def __init__(self):
        super().__init__(bias=True)


class HeadRecomputed(Tied):
    def forward(self, tokens):
        x = self.body(self.embed(tokens))
        return checkpoint(self.head, x, use_reentrant=False)


class EmbeddingRecomputed(Tied):
    def forward(self, tokens):
        x = checkpoint(lambda t: self.body(self.embed(t)), tokens, use_reentrant=False)
        return self.head(x)


class BodyRecomputed(Tied):
    def forward(self, tokens):
        return self.head(checkpoint(self.body, self.embed(tokens), use_reentrant=True))


class HalfPrecision(Tied):
    def __init__(self):
        super().__init__()
        self.bfloat16()
        self.body.float()

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens).float()).bfloat16())


def make(cls):
    torch.manual_seed(0)
    model = cls()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def zeroified(cls=Tied, stage=2, **options):
    return zero.zeroify(*make(cls), stage=stage, **options)


def reference(cls=Tied, **options):
    model, inner = make(cls)
    opt = hvd.DistributedOptimizer(
        inner, named_parameters=model.named_parameters(), sparse_as_dense=True, **options
    )
    return model, opt


def loss_of(model, step):
    generator = torch.Generator(torch.get_default_device()).manual_seed(100 * step + hvd.rank())
    tokens = torch.randint(0, WORDS, (6,), generator=generator)
    return F.cross_entropy(model(tokens).float(), tokens)


def one_step(model, opt, step):
    opt.zero_grad()
    loss_of(model, step).backward()
    opt.step()


def assert_trains_alike(make_step, cls=Tied, stage=2, exact=True, tol=1e-6, **options):
    """Like Horovod's own optimizer after three steps: to the bit, of one or two ranks."""
    models = []
    for model, opt in (reference(cls, **options), zeroified(cls, stage, **options)):
        for step in range(3):
            make_step(model, opt, step)
        models.append(model)
    assert_same(*models, exact=exact and hvd.size() <= 2, tol=tol)
    assert_replicated(models[1])


def repeatable(stage):
    """Whether a sum over the ranks comes out the same again. Horovod's has no fixed order."""
    return stage > 0 or hvd.size() <= 2


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cls", [Tied, HeadOnly, EitherOne, SparseEmbedding, FewWords])
def test_no_gradient_is_lost(stage, cls):
    assert_trains_alike(one_step, cls, stage)


ODD_USES = [EmbeddingTwice, HeadWithBias, HeadRecomputed, EmbeddingRecomputed, BodyRecomputed]


@pytest.mark.parametrize("cls", ODD_USES)
def test_other_ways_to_use_it(cls):
    assert_trains_alike(one_step, cls)


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_of_the_user_see_the_sum(stage):
    def doubled(model, opt, step):
        handle = model.embed.weight.register_hook(lambda grad: grad * 2)
        one_step(model, opt, step)
        handle.remove()

    assert_trains_alike(doubled, stage=stage)
    model, opt = zeroified(stage=stage)
    seen = []
    model.embed.weight.register_post_accumulate_grad_hook(seen.append)
    one_step(model, opt, 0)
    assert len(seen) == 1


@pytest.mark.parametrize("stage", [0, 2])
def test_autograd_grad_and_backward_of_chosen_inputs(stage):
    def chosen(model, opt, step):
        opt.zero_grad()
        loss = loss_of(model, step)
        (grad,) = torch.autograd.grad(loss, [model.embed.weight], retain_graph=True)
        assert grad.count_nonzero() == grad.numel()
        loss.backward(inputs=[model.body[0][0].weight], retain_graph=True)
        there = model.embed.weight.grad  # stands for the gradient of all ranks, and holds none
        assert there is None or there.untyped_storage().nbytes() <= 4
        loss.backward(inputs=[model.embed.weight])
        opt.step()

    assert_trains_alike(chosen, stage=stage)


@pytest.mark.parametrize("stage", STAGES)
def test_graphs_of_two_forward_passes_in_one_backward_pass(stage):
    def together(model, opt, step):
        opt.zero_grad()
        first = loss_of(model, step)
        first.backward(retain_graph=True)
        (first + loss_of(model, step + 50)).backward()
        opt.step()

    assert_trains_alike(together, stage=stage, exact=False, tol=1e-5, backward_passes_per_step=2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_pass_inside_another(stage):
    class InnerPass(Tied):
        def forward(self, tokens):
            x, one = self.embed(tokens), torch.ones((), requires_grad=True)
            again = checkpoint(lambda o: self.embed(tokens.flip(0)) * o, one, use_reentrant=True)
            return self.head(self.body(x + again))

    assert_trains_alike(
        one_step, InnerPass, stage=stage, exact=False, tol=1e-5, backward_passes_per_step=2
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_pass_that_fails_leaves_nothing_behind(stage):
    def fail(_):
        raise KeyError("in the middle")

    model, opt = zeroified(stage=stage)
    expected, plain = zeroified(stage=stage)
    for step in range(3):
        one_step(expected, plain, step)
        if step == 1:
            opt.zero_grad()
            handle = model.embed.register_forward_hook(
                lambda m, i, out: out.register_hook(fail) and None
            )
            with pytest.raises(KeyError, match="in the middle"):
                loss_of(model, 7).backward()
            handle.remove()
            opt.synchronize()
            opt.zero_grad()
            with torch.enable_grad():
                loss_of(model, 8)
        one_step(model, opt, step)
    assert_same(expected, model, exact=repeatable(stage))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cls", [Tied, HalfPrecision])
def test_gradients_that_are_added_up_locally(stage, cls):
    """As the same two passes in one."""

    def step_in_two(model, opt, step):
        with opt.no_sync():
            loss_of(model, step + 10).backward()
        loss_of(model, step + 20)  # an evaluation that forgot no_grad()
        loss_of(model, step).backward()

    def step_in_one(model, opt, step):
        (loss_of(model, step + 10) + loss_of(model, step)).backward()

    models = []
    for make_step in (step_in_one, step_in_two):
        model, opt = zeroified(cls, stage)
        for step in range(3):
            opt.zero_grad()
            make_step(model, opt, step)
            opt.step()
        models.append(model)
    assert_same(*models, exact=False, tol=1e-5 if cls is Tied else 1e-2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_weight_may_be_tied(stage):
    model, inner = make(Tied)
    model.embed.weight.requires_grad_(False)
    _, opt = zero.zeroify(model, inner, stage=stage)
    one_step(model, opt, 0)
    model.embed.weight.requires_grad_(True)
    one_step(model, opt, 1)
    assert_replicated(model)


def test_a_model_can_be_copied_and_saved_whole():
    model, opt = zeroified()
    one_step(model, opt, 0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_same(model, twin, exact=True)
        loss_of(twin, 1).backward()
        assert twin.head.weight.grad.count_nonzero() == WORDS * WIDTH
    one_step(model, opt, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_a_user_keeps_stay_as_they_are(stage):
    model, opt = zeroified(stage=stage)
    kept = []
    for step in range(3):
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.clip_grad_norm_(1e6)
        grads = [p.grad for group in opt.param_groups for p in group["params"]]
        opt.step()
        kept += [(grad, grad.clone()) for grad in grads if grad is not None]
        grads.clear()
    assert all(torch.equal(grad, value) for grad, value in kept)
