"""A torch job that may be preempted: preempted_torch_job.py STAGE STEPS SECONDS FOLDER [workers]

SECONDS is the length of a step. Checkpoints, what ranks say and the losses go to FOLDER. When it is
through, it makes the same steps at one stretch, and compares the losses.
"""

from __future__ import annotations

import json
import os
import sys
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
    # With a generator of its own it draws no seed from the one that dropout uses.
    own = torch.Generator()
    return torch.utils.data.DataLoader(data, batch_size=4, num_workers=workers, generator=own)


def run(stage: int, steps: int, seconds: float, folder: Path, workers: int) -> list[float]:
    model, opt = make(stage)
    torch.manual_seed(hvd.rank())
    history = {"losses": []}
    with zero.preemption(folder / "checkpoints", model, opt, state=history) as job:
        saying.say(folder, hvd.rank(), f"pid {os.getpid()} starts at {job.start_step}")
        step = job.start_step
        for x in batches(step, workers):
            if step == steps:
                break
            history["losses"].append(train(model, opt, x))
            time.sleep(seconds)
            try:
                job.step_done(step)
            except SystemExit:
                saying.say(folder, hvd.rank(), f"left after {step}")
                raise
            step += 1
    return history["losses"]


def main() -> None:
    stage, steps, seconds, folder, *how = sys.argv[1:]
    hvd.init()
    torch.set_num_threads(1)
    found = run(int(stage), int(steps), float(seconds), Path(folder), int("workers" in how))
    without = Path(folder, "without")
    without.mkdir(exist_ok=True)
    whole = run(int(stage), int(steps), 0.0, without, 0)
    if hvd.rank() == 0:
        assert found == whole
        Path(folder, "losses").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
