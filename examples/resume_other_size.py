"""Save on two ranks, resume on three: the checkpoint does not care.

    horovodrun -np 2 python examples/resume_other_size.py --steps 20
    horovodrun -np 3 python examples/resume_other_size.py --steps 40 --stage 3

Every rank writes and reads its own part. The number of ranks and the stage may change.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from torch.nn import functional as F

import zerohvd.torch as zero

BATCH = 48  # of all ranks together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zero.zeroify(model, optimizer, stage=args.stage)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)

    manager = zero.CheckpointManager(args.checkpoints, keep=2, every=10, asynchronous=True)
    done = manager.restore(model, optimizer, scheduler=schedule) or {"step": 0}
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks begin at step {done['step']}", flush=True)
    for step in range(done["step"] + 1, args.steps + 1):
        # All ranks together see the batch of this step, however many they are.
        whole = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))
        x = whole[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        schedule.step()
        extra = {"step": step}
        manager.step(step, model, optimizer, extra=extra, scheduler=schedule)
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {mean:.4f}", flush=True)
    manager.close()


if __name__ == "__main__":
    main()
