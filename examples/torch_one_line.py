"""A Horovod script for digits, with one line changed: the import.

    horovodrun -np 2 python examples/torch_one_line.py

It was `import horovod.torch as hvd`; examples/diffs/torch_one_line.diff has the whole difference.
Everything else is as Horovod's users write it.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

import zerohvd.torch as hvd


def make_net() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(
        *(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(0.25), nn.Linear(50, 10)),
    )


def digits(samples: int, seed: int) -> torch.utils.data.TensorDataset:
    """Noisy pictures of ten shapes, in the place of MNIST."""
    shapes = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0)).round()
    noise = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (samples,), generator=noise)
    pictures = shapes[labels] + 0.3 * torch.randn(samples, 1, 28, 28, generator=noise)
    return torch.utils.data.TensorDataset(pictures, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--fp16-allreduce", action="store_true")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    data = digits(1024, seed=1)
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    batches = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)

    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Average,
    )

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if step % 8 == 0:
                mean = hvd.allreduce(loss.detach(), name="loss").item()
                if hvd.rank() == 0:
                    print(f"epoch {epoch}, step {step}: loss {mean:.6f}", flush=True)


if __name__ == "__main__":
    main()
