"""A Horovod script for digits, with one line changed: the import.

    horovodrun -np 2 python examples/horovod_mnist.py

It was `import horovod.torch as hvd`; examples/diffs/horovod_mnist.diff has the whole difference.
Everything else is as Horovod's users write it.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

import zerohvd.torch as hvd


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 10, 5)
        self.conv2 = torch.nn.Conv2d(10, 20, 5)
        self.drop = torch.nn.Dropout2d()
        self.fc1 = torch.nn.Linear(320, 50)
        self.fc2 = torch.nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(F.dropout(x, training=self.training)), dim=1)


def digits(samples: int, seed: int) -> torch.utils.data.TensorDataset:
    """Noisy pictures of ten shapes, in the place of MNIST."""
    shapes = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0)).round()
    noise = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (samples,), generator=noise)
    pictures = shapes[labels] + 0.3 * torch.randn(samples, 1, 28, 28, generator=noise)
    return torch.utils.data.TensorDataset(pictures, labels)


def loader(data, batch_size: int):
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    return sampler, torch.utils.data.DataLoader(data, batch_size=batch_size, sampler=sampler)


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test(model, batches, samples: int) -> None:
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for data, target in batches:
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            right += output.argmax(1).eq(target).float().sum().item()
    loss = metric_average(loss / samples, "avg_loss")
    accuracy = metric_average(right / samples, "avg_accuracy")
    if hvd.rank() == 0:
        print(f"test loss {loss:.6f}, accuracy {accuracy:.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--fp16-allreduce", action="store_true")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    sampler, batches = loader(digits(1024, seed=1), 32)
    test_sampler, test_batches = loader(digits(512, seed=2), 128)

    model = Net()
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
        model.train()
        sampler.set_epoch(epoch)
        for step, (data, target) in enumerate(batches):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if step % 8 == 0 and hvd.rank() == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.6f}", flush=True)
        test(model, test_batches, len(test_sampler))


if __name__ == "__main__":
    main()
