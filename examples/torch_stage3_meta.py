"""Build and train a GPT that no rank ever holds whole: stage 3 with deferred initialisation.

    horovodrun -np 2 python examples/torch_stage3_meta.py

Under zero.deferred_init the model takes no memory. zeroify gives each rank its share of every
parameter, with the values that a plain start would have given it.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from gpt import GPT, Block

import zerohvd.torch as zero

VOCAB, LENGTH = 256, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same on all ranks
    with zero.deferred_init():
        model = GPT(vocab=VOCAB, dim=args.dim, layers=args.layers, heads=4, length=LENGTH)
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zero.zeroify(model, optimizer, stage=3, units=Block)

    torch.manual_seed(1 + hvd.rank())
    losses = []
    for _ in range(args.steps):
        starts = torch.randint(0, VOCAB, (4, 1))
        tokens = (starts + torch.arange(LENGTH + 1)) % VOCAB  # each token is followed by the next
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())

    report = zero.memory_report(optimizer)
    # A parameter can be looked at inside `gathered`, which all ranks enter.
    with zero.gathered(model.tokens):
        norm = model.tokens.weight.norm().item()
    if hvd.rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, norm of the embedding {norm:.2f}")
        print(f"{report['params'] / 4 / count:.0%} of {count:,} parameters are on this rank")
        print(report)


if __name__ == "__main__":
    main()
