"""A small residual network on data that the ranks cannot share evenly.

    horovodrun -np 2 python examples/torch_resnet.py

The samples do not divide by ranks and batch size. zero.DistributedSampler gives every sample to
one rank once, zero.even_steps lets all ranks take as many steps, and zero.weight counts each rank
by its samples: gradients are those of one process on the whole batch.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F

import zerohvd.torch as zero


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(hidden)))


def pictures(samples: int) -> torch.utils.data.TensorDataset:
    torch.manual_seed(0)
    shapes, labels = torch.randn(10, 3, 16, 16), torch.randint(0, 10, (samples,))
    return torch.utils.data.TensorDataset(shapes[labels] + torch.randn(samples, 3, 16, 16), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=203)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    data = pictures(args.samples)
    sampler = zero.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 16, 3, stride=2), *(Residual(16) for _ in range(3))]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model, optimizer = zero.zeroify(model, optimizer, stage=2)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)  # of the losses of all samples, and how many
        for batch in zero.even_steps(loader):
            optimizer.zero_grad()
            zero.weight(0 if batch is None else len(batch[0]))
            if batch is not None:  # this rank may have had all its samples
                loss = F.cross_entropy(model(batch[0]), batch[1])
                loss.backward()
                sums += torch.tensor([loss.item() * len(batch[0]), len(batch[0])])
            optimizer.step()
        total, count = hvd.allreduce(sums, op=hvd.Sum, name="loss").tolist()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {total / count:.3f} of {count:.0f} samples", flush=True)


if __name__ == "__main__":
    main()
