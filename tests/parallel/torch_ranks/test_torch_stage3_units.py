"""Stage 3: what models do in their forward and backward passes."""

from __future__ import annotations

import dataclasses

import horovod.torch as hvd
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import (
    adamw,
    assert_replicated,
    assert_same,
    batch,
    loss_of,
    make_model,
    train,
)

import zerohvd.torch as zero
from zerohvd.torch.gradients.reducer import GradReducer

DIM = 8
needs_ranks = pytest.mark.skipif(hvd.size() == 1, reason="one rank holds everything")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    """An embedding tied to the head, and repeated blocks between."""

    def __init__(self, depth=4):
        super().__init__()
        self.embed = nn.Embedding(11, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(DIM, 11, bias=False)
        self.head.weight = self.embed.weight

    def body(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def pair(cls=Blocks, make=adamw, **options):
    """The same model at stages 2 and 3, with their optimizers."""
    models = [make_model(cls=cls) for _ in range(2)]
    options = {"persist_below": 4, **options}
    _, two = zero.zeroify(models[0], make(models[0].parameters()), stage=2)
    _, three = zero.zeroify(models[1], make(models[1].parameters()), stage=3, **options)
    return models[0], two, models[1], three


def assert_trains_like_stage_2(cls=Blocks, steps=4, step=None, **options):
    """To the bit at one and two ranks."""
    two, opt_two, three, opt_three = pair(cls, **options)
    for number in range(steps):
        for model, opt in ((two, opt_two), (three, opt_three)):
            opt.zero_grad()
            if step is None:
                loss_of(model, batch(number, hvd.rank())).backward()
            else:
                step(model, number)
            opt.step()
    assert_same(two, three, exact=hvd.size() <= 2)
    assert_replicated(three)
    return three, opt_three


def states(opt):
    return {unit.name: unit.state for unit in opt.units.all}


@pytest.mark.parametrize(
    "units", [None, Block, (Block, nn.Embedding), lambda m: isinstance(m, nn.Linear)]
)
def test_units_by_themselves_by_class_and_by_predicate(units):
    _, opt = assert_trains_like_stage_2(units=units)
    if hvd.size() > 1 and units in (None, Block):
        names = ["(root)", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
        assert list(states(opt)) == names
        assert set(states(opt).values()) == {"sharded"}


def test_units_that_match_nothing_are_an_error():
    model = make_model(cls=Blocks)
    with pytest.raises(ValueError, match=r"matches no module.*Block"):
        zero.zeroify(model, adamw(model.parameters()), stage=3, units=nn.Conv2d)
    with pytest.raises(TypeError, match="units must be"):
        zero.zeroify(model, adamw(model.parameters()), stage=3, units="Block")
    with pytest.raises(ValueError, match=r"zero\.zeroify\(model"):
        zero.DistributedOptimizer(adamw(model.parameters()), stage=3)
    with pytest.raises(ValueError, match="stage=3 only"):
        zero.zeroify(model, adamw(model.parameters()), stage=2, units=Block)


class Untied(Blocks):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(DIM, 11, bias=False)


class HeadOfTheFirstRank(Untied):
    """The other ranks have no gradients of the head, which come first, ever."""

    def forward(self, tokens):
        x = self.body(self.embed(tokens))
        return self.head(x) if hvd.rank() == 0 else F.pad(x, (0, 3))


@needs_ranks
@pytest.mark.parametrize("cls", [Untied, HeadOfTheFirstRank])
def test_gradients_of_a_head_leave_before_those_of_the_blocks(cls, monkeypatch):
    sent, send = [], GradReducer.send

    def noted(self, b):
        sent[-1].extend(
            self._layout.params[slot.param].name for slot in self._layout.buckets[b].slots
        )
        send(self, b)

    def step(model, number):
        sent.append([])
        loss_of(model, batch(number, hvd.rank())).backward()

    monkeypatch.setattr(GradReducer, "send", noted)
    assert_trains_like_stage_2(cls, step=step)
    steps = sent[1::2]
    assert steps[0].index("head.weight") > steps[0].index("blocks.0.up.weight")
    for names in steps[1:]:
        assert names[0] == "head.weight"
        assert names.index("embed.weight") > names.index("blocks.0.up.weight")
    assert len({str(s) for s in hvd.allgather_object(steps)}) == 1


@needs_ranks
def test_two_units_and_the_root_are_whole_at_most():
    model = make_model(cls=lambda: Blocks(depth=6))
    model, opt = zero.zeroify(model, adamw(model.parameters()), stage=3, persist_below=4)
    most = [0]

    def look(*_):
        whole = [u for u in opt.units.all[1:] if any(p.gathered_nbytes for p in u.parts)]
        most.append(len(whole))

    for block in model.blocks:
        block.up.register_forward_hook(look)
        block.up.register_full_backward_hook(look)
    for step in range(3):
        most.clear()
        train(model, opt, steps=1, first=step)
        assert max(most) <= 2
    assert max(most) == 2, "nothing was gathered ahead"
    assert all(u.state == "sharded" for u in opt.units.all)
    moved = zero.communication_report(opt)
    psi = sum(p.numel() + 64 for p in model.parameters())
    n = hvd.size()
    assert moved["total"].bytes <= 3 * (n - 1) / n * 4 * psi


class OtherBlocksEachTime(Blocks):
    """What was gathered ahead is not what is needed."""

    calls = 0

    def body(self, x):
        self.calls += 1
        for i in (self.calls % 2, 2, 3):
            x = self.blocks[i](x)
        return x


class LastBlocksAside(Blocks):
    """The backward pass does not begin where the forward pass has ended."""

    def forward(self, tokens):
        x = self.blocks[1](self.blocks[0](self.embed(tokens)))
        self.blocks[3](self.blocks[2](x.detach()))
        return self.head(x)


@needs_ranks
@pytest.mark.parametrize("cls", [OtherBlocksEachTime, LastBlocksAside])
def test_there_is_no_third_unit_whatever_order_they_come_in(cls):
    model = make_model(cls=cls)
    model, opt = zero.zeroify(model, adamw(model.parameters()), stage=3, persist_below=4)
    most = []

    def look(*_):
        most.append(sum(u.state != "sharded" for u in opt.units.all[1:]))

    for module in (*(block.up for block in model.blocks), model.head):
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    train(model, opt, steps=5)
    assert max(most) == 2


@needs_ranks
def test_the_backward_pass_begins_with_what_the_forward_pass_has_left():
    model = make_model(cls=lambda: Blocks(depth=5))
    model, opt = zero.zeroify(model, adamw(model.parameters()), stage=3, persist_below=4)
    train(model, opt, steps=1)  # in which the order is learned
    before = [u.gathers for u in opt.units.all]
    train(model, opt, steps=1)
    with torch.no_grad():
        loss_of(model, batch(0, hvd.rank()))  # no backward pass will come
    gathers = [u.gathers - n for u, n in zip(opt.units.all, before, strict=True)]
    assert gathers == [1 + 1, 2 + 1, 2 + 1, 2 + 1, 1 + 1, 1 + 1]
    assert set(states(opt).values()) == {"sharded"}


@needs_ranks
def test_one_unit_and_the_root_are_gathered_when_the_last_gradients_are_made():
    model = make_model(cls=Blocks)
    model, opt = zero.zeroify(model, adamw(model.parameters()), stage=3, persist_below=4)
    seen = []
    model.embed.weight.register_hook(
        lambda _: seen.append([name for name, state in states(opt).items() if state != "sharded"])
    )
    train(model, opt, steps=3)
    assert seen == [["(root)", "blocks.0"]] * 3
    assert set(states(opt).values()) == {"sharded"}


class ScaledAtTheRoot(Blocks):
    """The root's own parameters are needed by the backward pass after that of the blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.full((DIM,), 2.0))

    def forward(self, tokens):
        return self.head(self.body(self.scale * self.first(self.embed(tokens)))) * self.scale[0]


class RecomputedAtTheRoot(ScaledAtTheRoot):
    """The same, but nothing refers to them until they are needed."""

    def forward(self, tokens):
        def begin(x):
            return self.blocks[0](x * self.scale)

        def end(x):
            return self.blocks[-1](self.blocks[2](self.blocks[1](x)))

        x = checkpoint(begin, self.first(self.embed(tokens)), use_reentrant=False)
        return self.head(checkpoint(end, x, use_reentrant=False))


@pytest.mark.parametrize("cls", [ScaledAtTheRoot, RecomputedAtTheRoot])
def test_the_root_stays_whole_while_the_backward_pass_needs_it(cls):
    assert_trains_like_stage_2(cls)


def test_units_may_stay_whole_between_forward_and_backward():
    _, opt = assert_trains_like_stage_2(reshard_after_forward=False)
    if hvd.size() > 1:
        gathers = [u.gathers for u in opt.units.all]
        assert gathers == [gathers[0]] * len(gathers)


class Nested(Blocks):
    """Groups of blocks with parameters of their own."""

    class Group(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(DIM))
            self.inner = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.inner:
                x = block(x) * self.scale
            return x

    def __init__(self):
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(self.Group() for _ in range(2))


def test_nested_units():
    _, opt = assert_trains_like_stage_2(Nested)
    if hvd.size() > 1:
        assert "blocks.1" in states(opt) and "blocks.1.inner.0" in states(opt)


class SharedBlock(Blocks):
    def __init__(self):
        super().__init__(depth=2)
        self.again = self.blocks[0]

    def body(self, x):
        return self.blocks[0](self.again(self.blocks[1](self.blocks[0](x))))


def test_one_module_used_several_times_in_one_forward():
    assert_trains_like_stage_2(SharedBlock)


class TiedAcrossUnits(Blocks):
    def __init__(self):
        super().__init__()
        self.blocks[3].up.weight = self.blocks[1].up.weight


def test_weights_tied_across_units_live_at_the_root():
    _, opt = assert_trains_like_stage_2(TiedAcrossUnits)
    if hvd.size() > 1:
        held = {id(p) for p in opt.units.root.params}
        assert id(opt.units.all[2].module.up.weight) in held


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole_body", [True, False])
def test_activation_checkpointing(reentrant, whole_body):
    class Checkpointed(Blocks):
        def body(self, x):
            if whole_body:
                return checkpoint(super().body, x, use_reentrant=reentrant)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    assert_trains_like_stage_2(Checkpointed)


def test_checkpoints_inside_a_unit():
    class Inside(Block):
        def forward(self, x):
            x = checkpoint(self.up, x, use_reentrant=False)
            return checkpoint(self.down, x, use_reentrant=True)

    class Model(Blocks):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Inside() for _ in range(3))

    assert_trains_like_stage_2(Model)


def test_several_forwards_per_backward():
    def step(model, number):
        losses = [loss_of(model, batch(10 * number + i, hvd.rank())) for i in range(3)]
        sum(losses).backward()

    assert_trains_like_stage_2(step=step)


def test_a_forward_without_gradients_between_forward_and_backward():
    def step(model, number):
        loss = loss_of(model, batch(number, hvd.rank()))
        with torch.no_grad():
            loss_of(model, batch(99, hvd.rank()))
        with torch.inference_mode():
            loss_of(model, batch(98, hvd.rank()))
        loss.backward(retain_graph=True)

    assert_trains_like_stage_2(step=step)


@dataclasses.dataclass
class Result:
    x: torch.Tensor
    extra: dict


class Structured(Blocks):
    class Returns(Block):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind

        def forward(self, x):
            y = super().forward(x)
            self.penalty = y.pow(2).mean() * 0.01
            return {
                "tuple": (y, None),
                "dict": {"y": y},
                "data": Result(y, {"note": 1}),
            }[self.kind]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Returns(k) for k in ("tuple", "dict", "data"))

    def body(self, x):
        x = self.blocks[2](self.blocks[1](self.blocks[0](x)[0])["y"]).x
        return x + sum(b.penalty for b in self.blocks)


def test_units_that_return_tuples_dicts_and_dataclasses():
    assert_trains_like_stage_2(Structured)


def test_autograd_grad_and_double_backward():
    def step(model, number):
        inputs, targets = batch(number, hvd.rank())
        x = model.embed(inputs).detach().requires_grad_()
        loss = F.cross_entropy(model.head(model.body(x)).flatten(0, 1), targets.flatten())
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.pow(2).sum()).backward()

    assert_trains_like_stage_2(step=step)


def test_modules_called_on_their_own():
    """Not through the model's forward, nor through that of a unit."""

    def step(model, number):
        inputs, targets = batch(number, hvd.rank())
        x = model.embed(inputs)
        block = model.blocks[0]
        x = model.blocks[1](x + block.down(block.up(x)))
        F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten()).backward()

    assert_trains_like_stage_2(step=step)


def test_evaluation_leaves_nothing_whole():
    model, opt = assert_trains_like_stage_2()
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss_of(model, batch(7, hvd.rank()))
        assert zero.memory_report(opt)["buffers"] == 0
    model.train()
    train(model, opt, steps=2)
    assert_replicated(model)


class Adapted(Blocks):
    """Frozen blocks with small trainable adapters beside them."""

    class WithAdapter(Block):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)
            self.low, self.high = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

        def forward(self, x):
            return super().forward(x) + self.high(self.low(x))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.WithAdapter() for _ in range(3))
        self.embed.requires_grad_(False)


@pytest.mark.parametrize("all_given", [True, False])
def test_frozen_parameters_are_sharded_and_get_no_gradient_memory(all_given):
    def make(params):
        return adamw([p for p in params if all_given or p.requires_grad])

    model, opt = assert_trains_like_stage_2(Adapted, make=make)
    psi = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    report, n, padding = zero.memory_report(opt), hvd.size(), 4 * 16 * 40
    assert report["params"] <= 4 * psi / n + padding
    assert report["grads"] <= 4 * trained / n + padding
    assert report["optimizer"] <= 8 * trained / n + 2 * padding


def test_an_exception_inside_forward_leaves_a_consistent_state():
    two, opt_two, three, opt_three = pair()

    def fail(*_):
        raise KeyError("no luck")

    for where in (three.blocks[2].down, three.head):
        hook = where.register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            loss_of(three, batch(0, hvd.rank()))
        hook.remove()
        assert zero.memory_report(opt_three)["buffers"] == 0
    broken = loss_of(three, batch(0, hvd.rank()))
    broken.register_hook(fail)
    with pytest.raises(KeyError):
        broken.backward()
    for model, opt in ((two, opt_two), (three, opt_three)):
        train(model, opt, steps=3)
    assert_same(two, three, exact=hvd.size() <= 2)


class Experts(Blocks):
    """Ranks run different units, and not the same number of them."""

    def body(self, x):
        for number, block in enumerate(self.blocks):
            if number <= hvd.rank() or number == 3:
                x = block(x)
        return x


def test_ranks_may_run_different_units():
    def step(model, number):
        loss = loss_of(model, batch(number, hvd.rank()))
        loss.backward()
        hvd.allreduce(loss.detach(), name="logged")

    assert_trains_like_stage_2(Experts, steps=2, step=step)


@needs_ranks
def test_a_rank_that_evaluates_alone_is_helped_by_those_in_step():
    model, opt = assert_trains_like_stage_2(steps=1)
    opt.zero_grad()
    loss_of(model, batch(1, hvd.rank())).backward()
    if hvd.rank() == 0:
        with torch.no_grad():
            loss_of(model, batch(2, 0))
    opt.step()
    assert_replicated(model)


def test_the_order_of_units_may_change():
    class Moody(Blocks):
        turn = 0

        def body(self, x):
            type(self).turn += 1
            order = [3, 0, 2, 1] if type(self).turn % 4 < 2 else [0, 1, 2, 3]
            for number in order:
                x = self.blocks[number](x)
            return x

    class Step:
        def __call__(self, model, number):
            Moody.turn = number
            loss_of(model, batch(number, hvd.rank())).backward()

    assert_trains_like_stage_2(Moody, step=Step())


def test_accumulation_no_sync_and_clipping():
    def step(model, number):
        opt = opts[model]
        with opt.no_sync():
            loss_of(model, batch(10 * number, hvd.rank())).backward()
        loss_of(model, batch(10 * number + 1, hvd.rank())).backward()
        opt.clip_grad_norm_(0.1)

    two, opt_two, three, opt_three = pair()
    opts = {two: opt_two, three: opt_three}
    for number in range(3):
        for model, opt in opts.items():
            opt.zero_grad()
            step(model, number)
            opt.step()
    assert_same(two, three, exact=False)


@pytest.mark.parametrize("where", ["inside", "unit", "model"])
def test_torch_compile(where):
    def step(model, number):
        loss_of(runs.get(model, model), batch(number, hvd.rank())).backward()

    two, opt_two, three, opt_three = pair()
    runs = {}
    for model in (two, three):
        for block in model.blocks:
            if where == "inside":
                block.up.compile(backend="aot_eager")
            elif where == "unit":
                block.compile(backend="aot_eager")
        if where == "model":
            runs[model] = torch.compile(model, backend="aot_eager")
    for number in range(3):
        for model, opt in ((two, opt_two), (three, opt_three)):
            opt.zero_grad()
            step(model, number)
            opt.step()
    assert_same(two, three, exact=False)
    torch._dynamo.reset()


@needs_ranks
def test_other_units_on_one_rank_are_an_error_on_all():
    model = make_model(cls=Blocks)
    units = Block if hvd.rank() == 0 else nn.Linear
    with pytest.raises(zero.DisagreementError, match="zeroify"):
        zero.zeroify(model, adamw(model.parameters()), stage=3, units=units, persist_below=4)
    persist = 4 + hvd.rank()
    with pytest.raises(zero.DisagreementError, match="persist_below"):
        zero.zeroify(model, adamw(model.parameters()), stage=3, persist_below=persist)


def test_blocks_that_were_compiled_before():
    class Compiled(Blocks):
        def __init__(self):
            super().__init__(depth=3)
            for number, block in enumerate(self.blocks):
                self.blocks[number] = torch.compile(block, backend="aot_eager")

    _, opt = assert_trains_like_stage_2(Compiled, units=Block)
    assert "blocks.1" in states(opt) or hvd.size() == 1
    torch._dynamo.reset()
