"""A torch job that is signalled. One launch of it answers many signals.

    preempted_torch_job.py STAGE STEPS FOLDER SAID [going_on|plain] [workers]

Signals itself at random moments if it is "going_on": it catches the SystemExit, goes back to the
checkpoint, and goes on from there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from zerohvd.preemption import listen

listen()

import horovod.torch as hvd  # noqa: E402
import saying  # noqa: E402
import torch  # noqa: E402

import zerohvd.torch as zero  # noqa: E402


class Rows(torch.utils.data.Dataset):
    """Row `i` depends on `i` alone."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def make(stage: int):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(33, 3)
    )
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    if stage == 3:
        return model, zero.zeroify(model, opt, stage=3)[1]
    return model, zero.DistributedOptimizer(
        opt, named_parameters=model.named_parameters(), stage=stage
    )


def train(model, opt, x: torch.Tensor) -> float:
    loss = (model(x) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def batches(first: int, workers: int):
    rows = range(first * 4 * hvd.size() + hvd.rank(), 100_000, hvd.size())
    data = torch.utils.data.Subset(Rows(), rows)
    return torch.utils.data.DataLoader(data, batch_size=4, num_workers=workers)


def main() -> None:
    stage, steps, folder, said, *how = sys.argv[1:]
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    workers = 1 if "workers" in how else 0
    model, opt = make(int(stage))
    history = {"losses": []}
    say = lambda text: saying.say(Path(said), hvd.rank(), text)  # noqa: E731
    with zero.preemption(folder, model, opt, state=history) as job:
        say(f"pid {os.getpid()} starts at {job.start_step}")
        step = job.start_step
        for x in batches(step, workers):
            if step == int(steps):
                break
            history["losses"].append(train(model, opt, x))
            time.sleep(0.01)
            try:
                job.step_done(step)
            except SystemExit:
                say(f"left after {step}")
                raise
            step += 1
    if hvd.rank() == 0:
        Path(said, "losses").write_text(json.dumps(history["losses"]))


def go_on() -> None:
    """Answer many signals in one launch; each time all ranks go back to what they have saved."""
    stage, signals, folder, said = sys.argv[1:5]
    hvd.init()
    torch.set_num_threads(1)
    model, opt = make(int(stage))
    reference = None
    asked: list[tuple[str, float]] = []
    answered = threading.Event()
    threading.Thread(
        target=send_signals, args=(int(signals), asked, answered), daemon=True
    ).start()
    left: list[int] = []
    times: list[float] = []
    with zero.preemption(folder, model, opt, keep=2) as job:
        step = job.start_step
        while len(left) < int(signals):
            began = time.monotonic()
            train(model, opt, Rows()[step * hvd.size() + hvd.rank()][None])
            try:
                job.step_done(step)
            except SystemExit as leaving:
                assert leaving.code == 85, leaving.code
                left.append(step)
                times.append(time.monotonic() - began)
                reference = check_saved(folder, stage, step, model, opt, reference)
                answered.set()
            step += 1
    everyone = hvd.allgather_object(left)
    assert all(steps == left for steps in everyone), everyone
    saying.say(Path(said), hvd.rank(), f"left {len(left)} times, together")


def check_saved(folder, stage, step, model, opt, other):
    """What was saved is what the ranks have, to the last bit: the same steps follow from both."""
    other = other or make(int(stage))
    twin, twin_opt = other
    stored = zero.CheckpointManager(folder).restore(twin, twin_opt)
    assert stored["step"] == step + 1, (stored, step)
    rng = torch.get_rng_state()
    for trained, optimizer in (other, (model, opt)):
        torch.set_rng_state(rng)
        loss = train(trained, optimizer, Rows()[step][None])
        print(step, loss, flush=True) if loss != loss else None
    same = [
        torch.equal(a, b)
        for a, b in zip(
            zero_state(model, opt), zero_state(twin, twin_opt), strict=True
        )
    ]
    assert all(same), same
    return other


def zero_state(model, opt) -> list[torch.Tensor]:
    found = opt.state_dict()["state"]
    return [entry[name] for entry in found.values() for name in sorted(entry)]


def send_signals(count: int, asked, answered) -> None:
    """From a thread of each rank: all ranks draw the same numbers, and the chosen ones signal."""
    rng = random.Random(7)
    for _ in range(count):
        wait, to_all = rng.uniform(0.0, 0.05), rng.random() < 0.3
        one, number = rng.randrange(hvd.size()), rng.choice([signal.SIGUSR1, signal.SIGTERM])
        time.sleep(wait)
        if to_all or one == hvd.rank():
            os.kill(os.getpid(), number)
        answered.wait()
        answered.clear()


if __name__ == "__main__":
    if "going_on" in sys.argv:
        go_on()
    else:
        main()
