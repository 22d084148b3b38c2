"""Horovod's kind of benchmark on made-up pictures, with one line changed: the import.

    horovodrun -np 2 python examples/horovod_synthetic_benchmark.py

It was `import horovod.torch as hvd`; examples/diffs/horovod_synthetic_benchmark.diff has the whole
difference.
"""

from __future__ import annotations

import argparse
import statistics
import timeit

import torch
from torch.nn import functional as F

import zerohvd.torch as hvd


def convnet(width: int) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    channels = 3
    for out in (width, 2 * width, 4 * width):
        layers += [
            torch.nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False),
            torch.nn.BatchNorm2d(out),
            torch.nn.ReLU(),
        ]
        channels = out
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, 1000)]
    return torch.nn.Sequential(*layers)


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-warmup-batches", type=int, default=2)
    parser.add_argument("--num-batches-per-iter", type=int, default=5)
    parser.add_argument("--num-iters", type=int, default=3)
    parser.add_argument("--fp16-allreduce", action="store_true")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = convnet(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    data = torch.randn(args.batch_size, 3, 64, 64)
    target = torch.randint(0, 1000, (args.batch_size,))

    def benchmark_step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()

    log(f"batch size {args.batch_size} on {hvd.size()} ranks")
    timeit.timeit(benchmark_step, number=args.num_warmup_batches)
    rates = []
    for i in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"iteration {i}: {rates[-1]:.1f} pictures a second and rank")
    log(f"all ranks: {hvd.size() * statistics.mean(rates):.1f} pictures a second")
    with torch.no_grad():
        log(f"last loss {F.cross_entropy(model(data), target).item():.6f}")


if __name__ == "__main__":
    main()
