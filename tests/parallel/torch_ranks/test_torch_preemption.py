"""Signals at random moments, to all ranks and to one: all save the same step, and go on from it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

import horovod.torch as hvd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import zerohvd.torch as zero
from zerohvd.preemption import listen

RANKS = [1, 2, 4]
SIGNALS = 25 if hvd.size() == 4 else 3


@pytest.fixture(autouse=True)
def plain_signals():
    """Whoever leaves listens until its process has ended."""
    yield
    listen(()).stop()


def make(stage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(33, 3)
    )
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    if stage == 3:
        return zero.zeroify(model, opt, stage=3)
    named = model.named_parameters()
    return model, zero.DistributedOptimizer(opt, named_parameters=named, stage=stage)


def seeded(number):
    return torch.Generator(torch.get_default_device()).manual_seed(number)


def train(model, opt, step):
    x = torch.randn(4, 8, generator=seeded(100 * step + hvd.rank()))
    opt.zero_grad()
    loss = (model(x) ** 2).mean()
    loss.backward()
    opt.step()
    return loss.item()


class Signals(threading.Thread):
    """A thread of each rank: all draw the same numbers, and those who are chosen get a signal."""

    def __init__(self, count):
        super().__init__(daemon=True)
        self.count, self.step, self.asked_in = count, 0, None
        self.answered = threading.Event()

    def run(self):
        rng = random.Random(7)
        for _ in range(self.count):
            wait, to_all = rng.uniform(0.0, 0.05), rng.random() < 0.3
            one = rng.randrange(hvd.size())
            number = rng.choice([signal.SIGUSR1, signal.SIGTERM])
            time.sleep(wait)
            if to_all or one == hvd.rank():
                self.asked_in = self.step
                os.kill(os.getpid(), number)
            self.answered.wait()
            self.answered.clear()


def same_on_all_ranks(value):
    everyone = hvd.allgather_object(value)
    assert all(v == value for v in everyone), everyone


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_signals_at_random_moments_make_all_ranks_save_the_same_step(stage, shared_folder):
    model, opt = make(stage)
    twin, twin_opt = make(stage)
    ask = Signals(SIGNALS)
    left = []
    with zero.preemption(shared_folder, model, opt, keep=1) as job:
        ask.start()
        while len(left) < SIGNALS:
            train(model, opt, ask.step)
            try:
                job.step_done(ask.step)
            except SystemExit as leaving:
                assert leaving.code == 85
                left.append(ask.step)
                # The step under way when the signal came, or the one after it.
                assert ask.asked_in is None or left[-1] - ask.asked_in <= 1
                ask.asked_in = None
                stored = zero.CheckpointManager(shared_folder).restore(twin, twin_opt)
                assert stored["step"] == ask.step + 1
                rng = torch.get_rng_state()
                loss = train(model, opt, -1)
                torch.set_rng_state(rng)
                assert train(twin, twin_opt, -1) == loss  # to the last bit
                hvd.barrier()
                ask.answered.set()
            ask.step += 1
    same_on_all_ranks(left)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_job_that_starts_again_goes_on_as_if_it_had_never_left(stage, shared_folder):
    model, opt = make(stage)
    whole = [train(model, opt, step) for step in range(9)]
    history = {"losses": []}
    for signalled_in in (2, 5, None):
        model, opt = make(stage)
        schedule = torch.optim.lr_scheduler.ConstantLR(opt.inner, factor=1.0)
        with (
            zero.preemption(shared_folder, model, opt, state=history, scheduler=schedule) as job,
            pytest.raises(SystemExit) if signalled_in else contextlib.nullcontext(),
        ):
            assert job.resumed == (signalled_in != 2)
            for step in range(job.start_step, 9):
                if step == signalled_in and hvd.rank() == hvd.size() - 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
                history["losses"].append(train(model, opt, step))
                job.step_done(step)
    if hvd.rank() == 0:  # whose state is stored
        assert history["losses"] == whole  # to the last bit


def test_no_collective_is_added_to_a_step(shared_folder):
    model, opt = make(2)
    train(model, opt, 0)
    before = zero.communication_report(opt)
    with zero.preemption(shared_folder, model, opt) as job:
        train(model, opt, 1)
        job.step_done(1)
        assert str(zero.communication_report(opt)) == str(before)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_without_an_optimizer_ranks_agree_too(shared_folder):
    model = torch.nn.Linear(2, 2)
    with zero.preemption(shared_folder, model) as job, pytest.raises(SystemExit):
        job.step_done()
        if hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        job.step_done()
    with zero.preemption(shared_folder, torch.nn.Linear(2, 2)) as job:
        assert job.start_step == 2


def test_a_job_leaves_before_its_time_ends(shared_folder):
    model, opt = make(2)
    with (
        zero.preemption(shared_folder, model, opt, walltime=10.7, requeue=False) as job,
        pytest.raises(SystemExit),
    ):
        began = time.monotonic()
        for step in range(10_000):
            train(model, opt, step)
            job.step_done(step)
    assert time.monotonic() - began < 5.0


def test_steps_that_differ_between_ranks_are_refused(shared_folder):
    model, opt = make(2)
    with zero.preemption(shared_folder, model, opt) as job:
        train(model, opt, 0)
        os.kill(os.getpid(), signal.SIGUSR1)
        train(model, opt, 1)
        if hvd.size() == 1:
            return
        with pytest.raises(ValueError, match="different steps"):
            job.step_done(hvd.rank())


def test_a_folder_of_other_checkpoints_is_refused(shared_folder):
    model, opt = make(2)
    zero.CheckpointManager(shared_folder).save(1, model, opt, extra={"mine": 1})
    with (
        pytest.raises(ValueError, match=r"not made by zero\.preemption"),
        zero.preemption(shared_folder, model, opt),
    ):
        pass
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


class Slow(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.ones(8)


def test_workers_outlive_signals_to_all_processes(shared_folder):
    """As schedulers send them; a worker that died would end the training with an error."""
    model, opt = make(2)
    with zero.preemption(shared_folder, model, opt) as job:
        loader = iter(DataLoader(Slow(), batch_size=1, num_workers=2))
        next(loader)
        workers = [w.pid for w in loader._workers]
        for number in (signal.SIGUSR1, signal.SIGTERM):
            for pid in (*workers, os.getpid()):
                os.kill(pid, number)
        with pytest.raises(SystemExit):
            for step, _ in enumerate(loader):
                train(model, opt, step)
                job.step_done(step)
        # Alone, a TERM ends a worker as it always did.
        os.kill(workers[0], signal.SIGTERM)
        with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
            time.sleep(2.0)
            list(loader)
