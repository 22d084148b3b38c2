"""Train a small GPT on the source code of Python's standard library, sharded over the ranks.

    horovodrun -np 2 python examples/torch_gpt.py --stage 2

One line differs from a plain Horovod script: zero.zeroify.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import horovod.torch as hvd
import torch
from gpt import GPT

import zerohvd.torch as zero

LENGTH = 128


def text() -> torch.Tensor:
    """About two megabytes of text that is on every machine."""
    folder = Path(argparse.__file__).parent
    data = b"".join(f.read_bytes() for f in sorted(folder.glob("[a-d]*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank")
    parser.add_argument("--summary", type=Path, help="write the results here as JSON")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(vocab=256, dim=256, layers=4, heads=4, length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zero.zeroify(model, optimizer, stage=args.stage)

    data = text()
    torch.manual_seed(1 + hvd.rank())
    losses = []
    for step in range(args.steps):
        starts = torch.randint(0, len(data) - LENGTH - 1, (args.batch,))
        batch = torch.stack([data[s : s + LENGTH + 1] for s in starts])
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        if hvd.rank() == 0 and step % 10 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.3f}", flush=True)

    report = zero.memory_report(optimizer)
    if hvd.rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\nthis rank holds\n{report}")
        if args.summary:
            held = {key: report[key] for key in ("params", "grads", "optimizer")}
            count = sum(p.numel() for p in model.parameters())
            summary = {"params": count, "before": losses[0], "after": losses[-1], "held": held}
            args.summary.write_text(json.dumps(summary))


if __name__ == "__main__":
    main()
