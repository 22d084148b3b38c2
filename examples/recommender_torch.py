"""Embedding tables of users and items, most of the model, cut over the ranks at stage 3.

    horovodrun -np 2 python examples/recommender_torch.py

Each table is a unit: gathered while a batch looks rows up, freed after. The optimizer's moments of
all rows stay cut up. examples/recommender_keras.py fetches only the rows that a batch needs.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F

import zerohvd.torch as zero

USERS, ITEMS, TASTES = 5000, 2000, 5


class Recommender(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, dim), nn.Embedding(ITEMS, dim)
        self.top = nn.Sequential(nn.Linear(2 * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.users(user), self.items(item)], dim=1)).squeeze(1)


def clicks(batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Users click on items of their own taste."""
    user, item = torch.randint(0, USERS, (batch,)), torch.randint(0, ITEMS, (batch,))
    return user, item, (user % TASTES == item % TASTES).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with zero.deferred_init():
        model = Recommender(args.dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer = zero.zeroify(model, optimizer, stage=3, units=nn.Embedding)

    torch.manual_seed(1 + hvd.rank())
    losses = []
    for _ in range(args.steps):
        user, item, clicked = clicks(1024)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(user, item), clicked)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
    report = zero.memory_report(optimizer)
    if hvd.rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\nthis rank holds\n{report}")


if __name__ == "__main__":
    main()
