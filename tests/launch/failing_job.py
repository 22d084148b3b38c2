"""A training job in which the last rank goes wrong, in the way it is told."""

from __future__ import annotations

import os
import signal
import sys

import horovod.torch as hvd
import torch

import zerohvd.torch as zero

how = sys.argv[1]
hvd.init()
torch.set_num_threads(1)
bad = hvd.rank() == hvd.size() - 1
width = 6 if how == "shape" and bad else 5
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, width))
opt = torch.optim.AdamW(model.parameters())
model, opt = zero.zeroify(model, opt, stage=2, bucket_bytes=64)

for step in range(1000):
    opt.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    if bad and step == 3:
        if how == "exception":
            raise ArithmeticError("this rank has had enough")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(0)
    loss.backward()
    if bad and step == 3 and how == "state_dict in between":
        opt.state_dict()
    opt.step()
