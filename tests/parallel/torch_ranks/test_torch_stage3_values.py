"""Stage 3: parameters' values outside of the model's passes."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
import weakref

import horovod.torch as hvd
import pytest
import torch
from test_torch_stage3_units import Block, Blocks, needs_ranks
from torch import nn
from training import adamw, assert_replicated, assert_same, batch, loss_of, make_model, train

import zerohvd.torch as zero


def three(cls=Blocks, **options):
    model = make_model(cls=cls)
    return zero.zeroify(model, adamw(model.parameters()), stage=3, persist_below=4, **options)


USES = {
    "arithmetic": lambda w: w + 1,
    "reading": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().cpu().numpy(),
    "data": lambda w: w.data.clone(),
    "writing": lambda w: w.data.zero_(),
    "item": lambda w: w[0, 0].item(),
    "matrix product": lambda w: torch.ones(1, w.shape[0]) @ w,
    "functional": lambda w: nn.functional.linear(torch.ones(1, w.shape[1]), w),
    "initialisation": lambda w: nn.init.normal_(w),
    "deepcopy": copy.deepcopy,
    "address": lambda w: w.data_ptr(),
    "conversion": lambda w: w.double(),
}


@needs_ranks
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_using_a_sharded_parameter_outside_is_an_error_with_its_name(use):
    model, _ = three()
    with pytest.raises(zero.ShardedStateError, match=r"'blocks\.1\.up\.weight'.*gathered"):
        use(model.blocks[1].up.weight)


def test_what_needs_no_values_works_all_the_time():
    model, opt = three()
    weight = model.blocks[1].up.weight
    assert weight.shape == (24, 8) and weight.numel() == 192 and weight.dtype == torch.float32
    assert weight.requires_grad and weight.is_leaf and weight.grad is None
    assert isinstance(weight, nn.Parameter) and "blocks.1.up" in repr(dict(model.named_modules()))
    assert sum(p.numel() for p in model.parameters()) > 0
    assert torch.zeros_like(weight).sum() == 0
    assert "weight" in repr(weight) or hvd.size() == 1
    model.to("cpu").train().requires_grad_(True)
    train(model, opt, steps=1)


def test_gathered_parameters_can_be_read_anywhere():
    model, opt = three()
    plain = make_model(cls=Blocks)
    with zero.gathered(model.embed):
        assert torch.equal(model.embed.weight, plain.embed.weight)
    with zero.gathered(model.blocks[0].up.weight), zero.gathered([model.blocks[2].norm.weight]):
        assert torch.equal(model.blocks[0].up.weight, plain.blocks[0].up.weight)
    assert zero.memory_report(opt)["buffers"] == 0


VIEWS = {
    "row": lambda w: w[0],
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data,
    "transposed": lambda w: w.t(),
}
READS = {
    "sum": lambda v: v.sum(),
    "item": lambda v: v.reshape(-1)[3].item(),
    "print": str,
    "addition": lambda v: v + 1,
    "numpy": lambda v: v.detach().cpu().numpy().sum(),
    "clone": lambda v: v.clone(),
    "write": lambda v: v.detach().fill_(7.0),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_kept_from_gathered_show_the_values_of_the_block(view):
    """Never a segmentation fault, and never another unit's values."""
    model, opt = three()
    with zero.gathered(model):
        kept = [view(block.up.weight) for block in model.blocks]
        values = [v.clone() for v in kept]
    assert zero.memory_report(opt)["buffers"] == 0
    train(model, opt, steps=2)
    if hvd.size() > 1:  # a rank on its own trains the very memory
        assert all(torch.equal(v, value) for v, value in zip(kept, values, strict=True))
    for read in READS.values():
        read(kept[1])
    with zero.gathered(model.blocks[1]):
        assert not (model.blocks[1].up.weight == 7.0).all() or hvd.size() == 1


class KeepsAView(Blocks):
    """Reads a parameter in the middle of its forward pass, when a graph refers to it."""

    kept = None

    def forward(self, tokens):
        x = self.embed(tokens)
        with zero.gathered(self.embed):
            self.kept = self.embed.weight.detach()[1]
            self.values = self.kept.clone()
        return self.head(self.body(x))


def test_views_kept_from_gathered_inside_a_forward_pass():
    model, opt = three(KeepsAView)
    expected, plain = three()
    for step in range(2):
        train(model, opt, steps=1, first=step)
        train(expected, plain, steps=1, first=step)
        assert torch.equal(model.kept, model.values) or hvd.size() == 1
    assert_same(expected, model, exact=hvd.size() <= 2)


@pytest.mark.parametrize("inside", ["forward", "backward", "both", "step before"])
def test_passes_inside_and_across_gathered(inside):
    def run(model, opt, number, block):
        opt.zero_grad()
        with block if inside in ("forward", "both") else contextlib.nullcontext():
            loss = loss_of(model, batch(number, hvd.rank()))
            if inside == "both":
                loss.backward()
        with block if inside == "backward" else contextlib.nullcontext():
            if inside != "both":
                loss.backward()
        opt.step()

    model, opt = three()
    expected, plain = three()
    for number in range(3):
        if inside == "step before":
            with zero.gathered(model):
                pass
        run(model, opt, number, zero.gathered(model))
        run(expected, plain, number, contextlib.nullcontext())
    assert_same(expected, model, exact=hvd.size() <= 2)
    assert zero.memory_report(opt)["buffers"] == 0


def test_written_values_come_from_one_rank_and_reach_all_shards():
    model, opt = three()
    with zero.gathered(model, writable=True):
        model.embed.weight.fill_(hvd.rank() + 1.0)
        if hvd.rank() == 0:
            model.blocks[0].up.weight.fill_(5.0)
    with zero.gathered(model):
        assert (model.embed.weight == 1.0).all()
        assert (model.blocks[0].up.weight == 5.0).all()
    if hvd.size() > 1:
        with zero.gathered(model.embed, writable=True, from_rank=1):
            model.embed.weight.fill_(hvd.rank() + 1.0)
        assert (model.state_dict()["embed.weight"] == 2.0).all()
    train(model, opt, steps=1)
    assert_replicated(model)


@needs_ranks
def test_writing_without_saying_so_is_an_error():
    model, _ = three()
    before = model.state_dict()["embed.weight"]
    with pytest.raises(RuntimeError, match="writable=True"), zero.gathered(model.embed):
        model.embed.weight.data.fill_(3.0)
    assert torch.equal(model.state_dict()["embed.weight"], before)
    with pytest.raises(TypeError, match="module"), zero.gathered("embed"):
        pass


def test_a_block_that_fails_has_written_nothing():
    model, opt = three()
    before = model.state_dict()
    with contextlib.suppress(ZeroDivisionError), zero.gathered(model, writable=True):
        model.embed.weight.fill_(3.0)
        raise ZeroDivisionError
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    train(model, opt, steps=1)
    assert_replicated(model)


class WritesInForward(Blocks):
    def forward(self, tokens):
        with contextlib.suppress(ZeroDivisionError), zero.gathered(self, writable=True):
            self.embed.weight.fill_(0.5)
            raise ZeroDivisionError
        self.seen = self.embed.weight.detach().clone()
        return super().forward(tokens)


@needs_ranks
def test_inside_a_pass_too_what_has_failed_is_seen_alike_by_all_and_goes_with_it():
    model = make_model(cls=WritesInForward)
    model, opt = zero.zeroify(model, adamw(model.parameters()), stage=3, persist_below=4)
    before = model.state_dict()["embed.weight"]
    with torch.no_grad():
        loss_of(model, batch(0, hvd.rank()))
    assert (model.seen == 0.5).all()
    assert torch.equal(model.state_dict()["embed.weight"], before)
    assert zero.memory_report(opt)["buffers"] == 0


def test_what_an_inner_block_has_written_is_nothing_new_to_the_outer_one():
    model, _ = three()
    with zero.gathered(model):
        with zero.gathered(model.embed, writable=True):
            model.embed.weight.fill_(3.0)
        assert (model.embed.weight == 3.0).all()
    assert (model.state_dict()["embed.weight"] == 3.0).all()


def test_a_model_that_nobody_has_any_more_takes_no_memory():
    model, opt = three()
    train(model, opt, steps=2)
    there = [weakref.ref(model), weakref.ref(opt), weakref.ref(model.blocks[0].up.weight)]
    del model, opt
    for _ in range(100):  # until the first rank, which might have saved it alone, has let go too
        gc.collect()
        if not any(ref() is not None for ref in there):
            return
        time.sleep(0.05)
    pytest.fail("something keeps the model alive")


@needs_ranks
def test_a_step_inside_gathered_is_refused():
    model, opt = three()
    loss_of(model, batch(0, hvd.rank())).backward()
    with zero.gathered(model.embed), pytest.raises(RuntimeError, match="in use"):
        opt.step()
    opt.step()


def test_gathered_takes_models_of_other_stages_too():
    model = make_model(cls=Blocks)
    zero.zeroify(model, adamw(model.parameters()), stage=2)
    with zero.gathered(model, writable=True):
        model.embed.weight.fill_(hvd.rank() + 1.0)
    assert (model.embed.weight == 1.0).all()


def test_the_models_state_goes_both_ways():
    plain = make_model(seed=3, cls=Blocks)
    model, opt = three()
    model.load_state_dict(plain.state_dict())
    assert_same(plain, model, exact=True)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in state.items())
    part = model.blocks[1].state_dict()
    assert torch.equal(part["up.weight"], plain.blocks[1].up.weight)
    model.blocks[1].up.load_state_dict(make_model(seed=4, cls=Blocks).blocks[1].up.state_dict())
    train(model, opt, steps=2)
    make_model(cls=Blocks).load_state_dict(model.state_dict())
    assert zero.memory_report(opt)["buffers"] == 0


def test_a_state_that_does_not_fit_is_refused_as_ever():
    model, opt = three()
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.3"):
        model.load_state_dict(make_model(cls=lambda: Blocks(depth=3)).state_dict())
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="assign"):
            model.load_state_dict(make_model(cls=Blocks).state_dict(), assign=True)
    train(model, opt, steps=1)


@needs_ranks
def test_loading_on_one_rank_only_is_an_error_on_all():
    model, opt = three()
    if hvd.rank() == 0:
        model.load_state_dict(make_model(seed=3, cls=Blocks).state_dict())
    loss_of(model, batch(0, hvd.rank())).backward()
    with pytest.raises(zero.DisagreementError, match="load_state_dict"):
        opt.step()


class Wide(Blocks):
    """Large enough for its tensors to be deferred."""

    def __init__(self):
        super().__init__(depth=3)
        self.embed = nn.Embedding(11, 8)
        self.wide = nn.Sequential(nn.Linear(8, 700), nn.Tanh(), nn.Linear(700, 8))
        self.register_buffer("table", torch.arange(5000.0).sqrt())
        nn.init.orthogonal_(self.wide[2].weight)

    def body(self, x):
        return super().body(x) + self.wide(x) * self.table[4]


@pytest.mark.parametrize("stage", [2, 3])
def test_deferred_initialisation_gives_the_values_of_the_plain_model(stage, monkeypatch):
    monkeypatch.setattr("zerohvd.torch.stage3.deferred.REAL_BELOW", 20)
    plain = make_model(cls=Wide)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    with zero.deferred_init():
        model = Wide()
    assert torch.equal(torch.rand(1), drawn), "the generator must stand where it would have"
    assert model.wide[0].weight.is_meta and model.table.is_meta
    opt = adamw(model.parameters())
    model, opt = zero.zeroify(model, opt, stage=stage)
    assert torch.equal(model.table, plain.table)
    assert_same(plain, model, exact=True)
    train(model, opt, steps=2)
    assert_replicated(model)


def test_deferred_models_with_other_seeds_get_the_first_ranks_values(monkeypatch):
    monkeypatch.setattr("zerohvd.torch.stage3.deferred.REAL_BELOW", 20)
    torch.manual_seed(hvd.rank())
    with zero.deferred_init():
        model = Wide()
    model, _ = zero.zeroify(model, adamw(model.parameters()), stage=3)
    assert_same(make_model(seed=0, cls=Wide), model, exact=True)
    model.load_state_dict(make_model(seed=9, cls=Wide).state_dict())
    assert_same(make_model(seed=9, cls=Wide), model, exact=True)


def test_meta_models_from_elsewhere_are_refused():
    with torch.device("meta"):
        model = Blocks()
    with pytest.raises(ValueError, match="deferred_init"):
        zero.zeroify(model, adamw(model.parameters()), stage=3, units=Block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memory_between_steps_of_narrow_parameters(dtype):
    class Half(Blocks):
        def __init__(self):
            super().__init__()
            self.to(dtype)

    model, opt = three(Half)
    train(model, opt, steps=2)
    psi, n = sum(p.numel() for p in model.parameters()), hvd.size()
    report, padding = zero.memory_report(opt), 16 * n * 12
    assert report["params"] <= 2 * (psi / n + padding)
    assert report["master"] <= 4 * (psi / n + padding)
    assert report["optimizer"] <= 8 * (psi / n + padding)
