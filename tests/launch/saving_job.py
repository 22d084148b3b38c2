"""Rank 0 saves at the end of the script, when the other ranks have nothing left to do."""

from __future__ import annotations

import sys
import time

import horovod.torch as hvd
import torch

import zerohvd.torch as zero

stage, path, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 7))
    opt = torch.optim.AdamW(model.parameters())
    model, opt = zero.zeroify(model, opt, stage=stage)
    for _ in range(3):
        opt.zero_grad()
        model(torch.ones(2, 7)).sum().backward()
        opt.step()
    together = opt.state_dict()
    if hvd.rank() == 0:
        time.sleep(1.0)  # an evaluation
        alone = opt.state_dict()
        for index, values in together["state"].items():
            assert all(torch.equal(v, alone["state"][index][k]) for k, v in values.items())
        torch.save({"model": model.state_dict(), "opt": alone}, path)
    elif how == "fails":
        raise ArithmeticError("this rank has had enough")


main()  # the model and the optimizer are gone when it returns
