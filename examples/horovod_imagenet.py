"""Horovod's kind of ImageNet training loop, with one line changed: the import.

    horovodrun -np 2 python examples/horovod_imagenet.py --checkpoints /tmp/imagenet

It was `import horovod.torch as hvd`; examples/diffs/horovod_imagenet.diff has the whole difference.
Rank 0 alone saves after every epoch, and alone restores; run it again with more --epochs to resume.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.nn import functional as F

import zerohvd.torch as hvd


class Residual(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm(self.conv(x)))


class Metric:
    """The mean of a number over all ranks and steps."""

    def __init__(self, name: str) -> None:
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value: torch.Tensor) -> None:
        self.sum += hvd.allreduce(value.detach(), name=self.name)
        self.n += 1

    @property
    def avg(self) -> float:
        return (self.sum / self.n).item()


def pictures(samples: int, classes: int, seed: int) -> torch.utils.data.TensorDataset:
    """Noisy pictures of a few shapes, in the place of ImageNet."""
    shapes = torch.randn(classes, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (samples,), generator=noise)
    found = shapes[labels] + torch.randn(samples, 3, 16, 16, generator=noise)
    return torch.utils.data.TensorDataset(found, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--batches-per-allreduce", type=int, default=2)
    parser.add_argument("--base-lr", type=float, default=0.0125)
    parser.add_argument("--warmup-epochs", type=float, default=1)
    args = parser.parse_args()
    folder = Path(args.checkpoints)

    hvd.init()
    torch.manual_seed(1 + hvd.rank())
    torch.set_num_threads(1)
    together = args.batch_size * args.batches_per_allreduce

    # Ranks may see a shared file system late: rank 0 says where to resume.
    done = [e for e in range(args.epochs, 0, -1) if (folder / f"checkpoint-{e}.pt").exists()]
    resume_from = hvd.broadcast(
        torch.tensor(done[0] if done else 0), root_rank=0, name="resume_from"
    ).item()

    data = pictures(500, classes=7, seed=1)
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    batches = torch.utils.data.DataLoader(data, batch_size=together, sampler=sampler)

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 12, 3, stride=2),
        *(Residual(12) for _ in range(3)),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 7),
    )
    lr_scaler = args.batches_per_allreduce * hvd.size()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.base_lr * lr_scaler, momentum=0.9, weight_decay=5e-5
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.batches_per_allreduce,
    )

    if resume_from > 0 and hvd.rank() == 0:
        checkpoint = torch.load(folder / f"checkpoint-{resume_from}.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def adjust_learning_rate(epoch: int, step: int) -> None:
        exact = epoch + (step + 1) / len(batches)
        if exact < args.warmup_epochs:
            factor = 1 / hvd.size() * (exact * (hvd.size() - 1) / args.warmup_epochs + 1)
        else:
            factor = 0.1 ** (epoch // 30)
        for group in optimizer.param_groups:
            group["lr"] = args.base_lr * lr_scaler * factor

    def train(epoch: int) -> None:
        model.train()
        sampler.set_epoch(epoch)
        loss_of_all, accuracy = Metric("train_loss"), Metric("train_accuracy")
        for step, (x, y) in enumerate(batches):
            adjust_learning_rate(epoch, step)
            optimizer.zero_grad()
            for i in range(0, len(x), args.batch_size):
                part, target = x[i : i + args.batch_size], y[i : i + args.batch_size]
                output = model(part)
                accuracy.update(output.argmax(1).eq(target).float().mean())
                loss = F.cross_entropy(output, target)
                loss_of_all.update(loss)
                loss.div_(math.ceil(len(x) / args.batch_size))
                loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss_of_all.avg:.6f}, {accuracy.avg:.2%}", flush=True)

    def save_checkpoint(epoch: int) -> None:
        if hvd.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / f"checkpoint-{epoch + 1}.pt")

    for epoch in range(resume_from, args.epochs):
        train(epoch)
        save_checkpoint(epoch)


if __name__ == "__main__":
    main()
