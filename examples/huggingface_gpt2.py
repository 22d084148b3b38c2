"""A GPT-2 of Hugging Face's transformers, made from its configuration and trained at stage 3.

    pip install transformers
    horovodrun -np 2 python examples/huggingface_gpt2.py

Nothing is downloaded. The blocks are found by themselves: they are the items of a ModuleList.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import zerohvd.torch as zero

VOCAB, LENGTH = 256, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="write the trained model to this folder")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = {"n_embd": 128, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, **size)
    with zero.deferred_init():
        model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zero.zeroify(model, optimizer, stage=args.stage)
    model.train()

    torch.manual_seed(1 + hvd.rank())
    losses = []
    for _ in range(args.steps):
        tokens = (torch.randint(0, VOCAB, (4, 1)) + torch.arange(LENGTH)) % VOCAB
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())

    report = zero.memory_report(optimizer)
    whole = model.state_dict()  # on all ranks: it gathers one unit after the other
    if hvd.rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\nthis rank holds\n{report}")
        if args.save:
            model.save_pretrained(args.save, state_dict=whole)


if __name__ == "__main__":
    main()
