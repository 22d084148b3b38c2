"""Mixed precision, gradient accumulation, clipping and a schedule, with sharded state.

    horovodrun -np 2 python examples/torch_amp_accumulate.py

The loop is torch's. Two things are zerohvd's: backward_passes_per_step says how many micro-batches
make a step, and zero.GradScaler, whose ranks skip the same steps, is in the place of torch's.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from torch.nn import functional as F

import zerohvd.torch as zero


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro-batches", type=int, default=4)
    args = parser.parse_args()

    hvd.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(hvd.local_rank())
    half = torch.float16 if device == "cuda" else torch.bfloat16  # what the device is fast at
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = zero.zeroify(
        model, optimizer, stage=2, backward_passes_per_step=args.micro_batches
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    scaler = zero.GradScaler(device)

    torch.manual_seed(1 + hvd.rank())
    losses = []
    for _ in range(args.steps):
        total = torch.zeros(())
        optimizer.zero_grad()
        for _ in range(args.micro_batches):
            x = torch.randn(16, 32, device=device)
            with torch.amp.autocast(device, dtype=half):
                loss = F.mse_loss(model(x), x.sum(1, keepdim=True)) / args.micro_batches
            scaler.scale(loss).backward()
            total += loss.detach().cpu()
        scaler.unscale_(optimizer)  # gradients of all ranks and micro-batches, reduced
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        losses.append(hvd.allreduce(total, name="loss").item())

    if hvd.rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, scale {scaler.get_scale():g}")
        print(f"last norm {norm:.3f}, last learning rate {schedule.get_last_lr()[0]:g}")


if __name__ == "__main__":
    main()
