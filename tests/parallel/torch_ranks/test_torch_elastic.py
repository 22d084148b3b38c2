"""A PyTorch training that is committed to memory goes on from there."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from training import STAGES, adamw, assert_same, batch, distribute, loss_of, make_model, train

import zerohvd.torch as zero
from zerohvd.elastic.copies import Copies


def build(stage: int, seed: int, dtype: torch.dtype = torch.float32):
    model = make_model(seed).to(dtype)
    opt = distribute(model, adamw(model.parameters()), stage=stage, bucket_bytes=1024)
    return model, opt


@pytest.fixture
def job(shared_folder, monkeypatch):
    """As if `zerohvd run` had started these ranks."""
    monkeypatch.setenv("ZEROHVD_ELASTIC", str(shared_folder / "job"))
    return shared_folder / "job"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_from_a_commit_bit_by_bit(stage, dtype, job, two_hosts):
    """On two hosts; masters of 16-bit parameters, schedulers, random numbers and values too."""
    model, opt = build(stage, 0, dtype)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    state = zero.elastic.TorchState(model, opt, scheduler=scheduler, step=0, best=None)
    state.restore()
    train(model, opt, 3)
    scheduler.step()
    state.step, state.best = 3, {"loss": 1.5}
    torch.manual_seed(hvd.rank())
    state.commit()
    drawn = torch.rand(3)
    train(model, opt, 2, first=3)

    other, again = build(stage, 1, dtype)
    stepping = torch.optim.lr_scheduler.StepLR(again, 1, gamma=0.5)
    begun = zero.elastic.TorchState(other, again, scheduler=stepping, step=0, best=None)
    begun.restore()
    assert (begun.step, begun.best) == (3, {"loss": 1.5})
    assert again.param_groups[0]["lr"] == opt.param_groups[0]["lr"]
    assert torch.equal(torch.rand(3), drawn)
    train(other, again, 2, first=3)
    assert_same(model, other, exact=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_commit_between_two_backward_passes_of_a_step(stage, job):
    model, opt = build(stage, 0)
    state = zero.elastic.TorchState(model, opt)
    state.restore()
    train(model, opt, 1)
    opt.zero_grad()
    with opt.no_sync():
        loss_of(model, batch(1, hvd.rank())).backward()
    state.commit()
    other, again = build(stage, 1)
    zero.elastic.TorchState(other, again).restore()
    for each, its in ((model, opt), (other, again)):
        loss_of(each, batch(2, hvd.rank())).backward()
        its.step()
    assert_same(model, other, exact=hvd.size() <= 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_commit_sends_parameters_and_state_of_a_shard_to_the_other_host(
    stage, job, two_hosts, monkeypatch
):
    """12 bytes per parameter with Adam, divided by the number of ranks, at every stage."""
    sent = []
    commit = Copies.commit

    def counted(self, *args):
        commit(self, *args)
        sent.append(self.sent)

    monkeypatch.setattr(Copies, "commit", counted)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 301), torch.nn.Linear(301, 299))
    params = sum(p.numel() for p in model.parameters())
    model, opt = zero.zeroify(model, adamw(model.parameters()), stage=stage)
    opt.zero_grad()
    model(torch.randn(2, 300)).sum().backward()
    opt.step()
    zero.elastic.TorchState(model, opt).commit()
    if hvd.size() == 1:
        assert sent == [0]  # there is no other host
    else:
        ideal = 12 * params / hvd.size()
        assert ideal * 0.95 < sent[0] < ideal * 1.05 + 20_000  # random number generators: 8 KB


def test_where_a_shard_and_its_copy_are_gone_the_newest_checkpoint_is_loaded(
    job, shared_folder, two_hosts
):
    model, opt = build(2, 0)
    manager = zero.CheckpointManager(shared_folder / "disk")
    state = zero.elastic.TorchState(model, opt, checkpoints=manager, step=0)
    state.restore()
    train(model, opt, 2)
    state.step = 2
    manager.save(2, model, opt, extra=state.values())
    train(model, opt, 1, first=2)
    state.step = 3
    state.commit()
    hvd.barrier()
    if hvd.rank() == 0:
        for file in job.rglob("*-0-of-*"):
            file.unlink()
    hvd.barrier()
    other, again = build(2, 1)
    if hvd.size() > 1:  # of one rank nothing is left: as in a job that has never committed
        with pytest.raises(zero.elastic.LostStateError, match=r"shards of ranks \[0\] are gone"):
            zero.elastic.TorchState(other, again, step=0).restore()
    begun = zero.elastic.TorchState(other, again, checkpoints=manager, step=0)
    begun.restore()
    assert begun.step == 2
    train(other, again, 1, first=2)
    assert_same(model, other, exact=hvd.size() <= 2)


def test_values_that_would_not_be_committed_are_refused(job):
    model, opt = build(2, 0)
    state = zero.elastic.TorchState(model, opt, step=0)
    with pytest.raises(AttributeError, match=r"TorchState\(\.\.\., epoch=\.\.\.\)"):
        state.epoch = 1
    with pytest.raises(ValueError, match="cannot be called 'commit'"):
        zero.elastic.TorchState(model, opt, commit=0)
    with pytest.raises(TypeError, match="sampler must have state_dict"):
        zero.elastic.TorchState(model, opt, sampler=torch.utils.data.SequentialSampler([1]))
    with pytest.raises(TypeError, match=r"opt must come from zero\.DistributedOptimizer"):
        zero.elastic.TorchState(model, adamw(model.parameters()))


def test_two_states_that_would_remove_each_others_commits_are_refused(job):
    first, second = (zero.elastic.TorchState(*build(2, seed)) for seed in (0, 1))
    first.restore()
    second.restore()
    second.commit()
    with pytest.raises(RuntimeError, match="one optimizer and one state"):
        first.commit()


@pytest.mark.skipif(hvd.size() < 3, reason="a process set of some ranks")
def test_a_state_of_some_ranks_is_refused(job, members):
    model = make_model()
    inner = adamw(model.parameters())
    named = model.named_parameters()
    if members.included():
        opt = zero.DistributedOptimizer(inner, named_parameters=named, process_set=members)
        with pytest.raises(ValueError, match=f"process set has {hvd.size() - 1} of {hvd.size()}"):
            zero.elastic.TorchState(model, opt).restore()


@pytest.mark.skipif(hvd.size() == 1, reason="one rank is always of one mind")
def test_ranks_that_lack_the_variable_of_the_supervisor_are_named(job, monkeypatch):
    model, opt = build(2, 0)
    if hvd.rank() == 1:
        monkeypatch.delenv("ZEROHVD_ELASTIC")
    with pytest.raises(ValueError, match=r"None on rank 1.*mpirun -x ZEROHVD_ELASTIC"):
        zero.elastic.TorchState(model, opt).restore()


@pytest.mark.parametrize("then", [1, 2, 3, 5])
def test_a_sampler_goes_on_where_it_was_with_any_number_of_ranks(then):
    data, size, size_of_batch = range(23), 3, 2
    first = [zero.DistributedSampler(data, size, r, seed=1) for r in range(size)]
    used = []
    for sampler in first:
        sampler.set_epoch(4)
        used += list(sampler)[: 2 * size_of_batch]  # two steps
        sampler.advance(size_of_batch)
        sampler.advance(size_of_batch)
    for rank in range(then):
        sampler = zero.DistributedSampler(data, then, rank, seed=1)
        sampler.load_state_dict(first[0].state_dict())
        sampler.set_epoch(4)
        left = list(sampler)
        assert len(left) == len(sampler)
        used += left
        sampler.set_epoch(5)
        assert sampler.done == 0
    assert sorted(used) == list(data)
    with pytest.raises(ValueError, match="23 samples; this one has 7"):
        zero.DistributedSampler(range(7), 1, 0).load_state_dict(first[0].state_dict())
