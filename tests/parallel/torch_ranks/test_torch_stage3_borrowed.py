"""Stage 3: modules that use the parameters of other modules themselves."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from test_torch_stage3_units import (
    DIM,
    Block,
    Blocks,
    assert_trains_like_stage_2,
    needs_ranks,
    pair,
    states,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import assert_replicated, assert_same, batch, loss_of, train

import zerohvd.torch as zero

RANKS = (2, 3)  # two are bitwise, three have other sums

UNITS = (Block, nn.Embedding)  # the embedding too is freed as soon as it has run


class TiedByHand(Blocks):
    """The head is no module: the model multiplies by the embedding's weight itself."""

    def __init__(self):
        super().__init__()
        del self.head

    def head_of(self, x):
        return F.linear(x, self.embed.weight)

    def forward(self, tokens):
        return self.head_of(self.body(self.embed(tokens)))


class TiedInAHelper(TiedByHand):
    """The helper is a module without parameters, and is handed the weight."""

    class Head(nn.Module):
        def forward(self, x, weight):
            return x @ weight.t()

    def __init__(self):
        super().__init__()
        self.help = self.Head()

    def head_of(self, x):
        return self.help(x, self.embed.weight)


class UsedRightAfterItRan(Blocks):
    """Its values are still there, but not when the backward pass comes to this use of them."""

    def body(self, x):
        x = self.blocks[0](x)
        x = x + F.linear(F.linear(x, self.blocks[0].up.weight), self.blocks[0].down.weight)
        for block in self.blocks[1:]:
            x = block(x)
        return x


class UsedBeforeAndAfter(TiedByHand):
    def forward(self, tokens):
        x = self.blocks[0](torch.ones(11, 11)[tokens] @ self.embed.weight)
        x = self.blocks[1](x) + self.embed(tokens)
        return self.head_of(self.blocks[2](x))


class InListsAndDicts(Blocks):
    """Kept where torch does not look for parameters."""

    def __init__(self):
        super().__init__()
        self.kept = [self.blocks[1].up.weight, {"down": (self.blocks[2].down.weight,)}]

    def body(self, x):
        x = super().body(x)
        return x + F.linear(F.linear(x, self.kept[0]), self.kept[1]["down"][0])


class BlocksUseEachOther(Blocks):
    """Every block uses the weights of the one before it."""

    class Block(Block):
        before = ()

        def forward(self, x):
            for other in self.before:
                x = x + F.linear(x, other.up.weight)[..., :DIM]
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        for first, second in zip(self.blocks, self.blocks[1:], strict=False):
            second.before = (first,)


class ReturnsItsBias(Blocks):
    """To be added by the caller, in one operation with others."""

    class Block(Block):
        def forward(self, x):
            hidden = torch.tanh(self.up(self.norm(x)))
            return x + F.linear(hidden, self.down.weight), self.down.bias

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def body(self, x):
        biases = []
        for block in self.blocks:
            x, bias = block(x)
            biases.append(bias)
        return x + torch.stack(biases).sum(0)


class ReturnsViews(ReturnsItsBias):
    class Block(Block):
        def forward(self, x):
            return super().forward(x), {"up": self.up.weight.t(), "row": self.down.weight[0]}

    def body(self, x):
        kept = []
        for block in self.blocks:
            x, views = block(x)
            kept.append(views)
        for views in kept:
            x = x + (x @ views["up"] * views["row"])[..., :DIM]
        return x


class OfDetached(TiedByHand):
    def head_of(self, x):
        scale = self.embed.weight.detach().norm() + self.blocks[1].up.weight.data.abs().max()
        return F.linear(x, self.embed.weight) / scale


class ReadsFirst(TiedByHand):
    """Without gradients first, so that it is gathered when the use that has gradients comes."""

    def head_of(self, x):
        with torch.no_grad():
            scale = torch.stack([block.up.weight.norm() for block in self.blocks]).sum()
        x = x + F.linear(F.linear(x, self.blocks[0].up.weight), self.blocks[0].down.weight)
        return F.linear(x, self.embed.weight) / scale


class AddedUp(TiedByHand):
    """A penalty on all weights, computed by the model."""

    def forward(self, tokens):
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        return super().forward(tokens) + 0.01 * penalty


def recomputed(cls, reentrant, what):
    class Recomputed(cls):
        def head_of(self, x):
            if what == "head":
                return checkpoint(super().head_of, x, use_reentrant=reentrant)
            return super().head_of(x)

        def body(self, x):
            if what == "body":
                return checkpoint(super().body, x, use_reentrant=reentrant)
            return super().body(x)

    return Recomputed


USES = [
    TiedByHand,
    TiedInAHelper,
    UsedRightAfterItRan,
    UsedBeforeAndAfter,
    InListsAndDicts,
    BlocksUseEachOther,
    ReturnsItsBias,
    ReturnsViews,
    OfDetached,
    ReadsFirst,
    AddedUp,
]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("cls", USES)
def test_gradients_are_the_sum_of_all_uses_and_nothing_stays(cls, reshard):
    model, opt = assert_trains_like_stage_2(cls, units=UNITS, reshard_after_forward=reshard)
    assert set(states(opt).values()) == {"sharded"} or hvd.size() == 1
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss_of(model.eval(), batch(7, hvd.rank()))
        assert zero.memory_report(opt)["buffers"] == 0
    train(model.train(), opt, steps=1)
    assert_replicated(model)


@pytest.mark.parametrize("cls", USES)
def test_they_may_be_recomputed(cls):
    part = "head" if issubclass(cls, TiedByHand) else "body"
    assert_trains_like_stage_2(recomputed(cls, False, part), units=UNITS)


class HeadOnly(TiedByHand):
    """Reentrant checkpoints make gradients in passes of their own: one of each parameter."""

    def forward(self, tokens):
        return self.head_of(self.body(self.embed(tokens).detach().requires_grad_()))


@pytest.mark.parametrize("cls", [HeadOnly, InListsAndDicts, BlocksUseEachOther, ReturnsViews])
def test_they_may_be_recomputed_in_a_backward_pass_of_their_own(cls):
    part = "head" if issubclass(cls, TiedByHand) else "body"
    assert_trains_like_stage_2(recomputed(cls, True, part), units=UNITS)


@pytest.mark.parametrize("cls", USES)
def test_other_passes_may_come_before_the_backward_pass(cls):
    def step(model, number):
        losses = [loss_of(model, batch(10 * number + i, hvd.rank())) for i in range(2)]
        with torch.no_grad():
            loss_of(model, batch(99, hvd.rank()))
        losses.append(loss_of(model, batch(10 * number + 2, hvd.rank())))
        sum(losses).backward()

    assert_trains_like_stage_2(cls, step=step, units=UNITS)


@pytest.mark.parametrize("cls", [TiedByHand, UsedBeforeAndAfter])
def test_second_derivatives_of_what_was_borrowed(cls):
    def step(model, number):
        loss = loss_of(model, batch(number, hvd.rank()))
        weights = list(model.parameters())
        slopes = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        (loss + sum(s.pow(2).sum() for s in slopes if s is not None)).backward()

    assert_trains_like_stage_2(cls, step=step, units=UNITS)


class OnOneRankOnly(TiedByHand):
    def forward(self, tokens):
        x = self.body(self.embed(tokens))
        if hvd.rank() == 0:
            x = x + F.linear(x, self.blocks[0].up.weight)[..., :DIM]
        return self.head_of(x)


def test_ranks_may_use_different_parameters_themselves():
    def step(model, number):
        loss_of(model, batch(number, hvd.rank())).backward()
        hvd.allreduce(torch.ones(1), name="logged")

    assert_trains_like_stage_2(OnOneRankOnly, steps=2, step=step, units=UNITS)


@needs_ranks
def test_what_is_borrowed_is_gathered_while_it_is_used_and_ahead_of_that():
    _, _, model, opt = pair(TiedByHand, units=UNITS)
    embed = next(u for u in opt.units.all if u.name == "embed")
    seen = []
    model.blocks[2].register_forward_hook(lambda *_: seen.append(embed.state))
    for block in model.blocks[3:]:
        block.up.register_forward_hook(lambda *_: seen.append(embed.state != "sharded"))
    for step in range(3):
        train(model, opt, steps=1, first=step)
    assert seen == ["sharded", False] + ["sharded", True] * 2
    before = [u.gathers for u in opt.units.all]
    train(model, opt, steps=1)
    gathers = {
        u.name: u.gathers - n for u, n in zip(opt.units.all, before, strict=True)
    }
    assert gathers["embed"] == 3 or gathers["embed"] == 2


@needs_ranks
@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.data.mul_(2),
        lambda w: nn.init.zeros_(w),
        lambda w: w.data.__setitem__(0, 1.0),
        lambda w: torch.add(w.detach(), 1, out=w.data),
        lambda w: setattr(w, "data", torch.zeros(11, DIM)),
    ],
)
def test_writing_what_belongs_to_another_unit_is_refused_in_a_pass_too(write):
    class Writes(TiedByHand):
        def head_of(self, x):
            with torch.no_grad():
                write(self.embed.weight)
            return super().head_of(x)

    _, _, model, opt = pair(Writes, units=UNITS)
    with pytest.raises(zero.ShardedStateError, match=r"'embed\.weight'.*writable=True"):
        loss_of(model, batch(0, hvd.rank()))
    assert zero.memory_report(opt)["buffers"] == 0


@needs_ranks
def test_a_view_that_a_model_returns_to_nobody_is_an_error():
    class Returns(TiedByHand):
        def forward(self, tokens):
            super().forward(tokens)
            return self.embed.weight.t()

    _, _, model, opt = pair(Returns, units=UNITS)
    with pytest.raises(RuntimeError, match=r"view.*embed\.weight.*clone"):
        model(batch(0, hvd.rank())[0])
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"view.*embed\.weight.*clone"):
        model(batch(0, hvd.rank())[0])
    assert zero.memory_report(opt)["buffers"] == 0


@needs_ranks
def test_a_pass_that_fails_gives_back_what_it_has_borrowed():
    class Fails(TiedByHand):
        fails = True

        def head_of(self, x):
            made = super().head_of(x)
            if self.fails:
                raise KeyError("after the use")
            return made

    two, opt_two, three, opt_three = pair(Fails, units=UNITS)
    with pytest.raises(KeyError):
        loss_of(three, batch(0, hvd.rank()))
    assert zero.memory_report(opt_three)["buffers"] == 0
    for model, opt in ((two, opt_two), (three, opt_three)):
        model.fails = False
        train(model, opt, steps=2)
    assert_same(two, three)


@pytest.mark.parametrize("where", ["model", "unit"])
def test_compiled_models_may_do_it_too(where):
    two, opt_two, three, opt_three = pair(TiedByHand, units=UNITS)
    for model, opt in ((two, opt_two), (three, opt_three)):
        run = torch.compile(model, backend="aot_eager") if where == "model" else model
        if where == "unit":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        train(run, opt, steps=3)
    assert_same(two, three, exact=False)
    torch._dynamo.reset()


class Recursive(Blocks):
    """A unit that runs inside itself, with others in between."""

    class Tree(Block):
        leaf = ()

        def forward(self, x, depth=2):
            if depth:
                x = self.leaf[0](self(x, depth - 1)) + self(x * 0.5, depth - 1)
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Tree(), self.Tree(), Block(), Block()])
        for tree in self.blocks[:2]:
            tree.leaf = (self.blocks[2],)


def test_a_unit_may_run_inside_itself():
    assert_trains_like_stage_2(Recursive, units=(Recursive.Tree, Block))
