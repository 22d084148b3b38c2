"""One process, Horovod twice: python second_init_job.py STAGE, under mpirun."""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch
from mpi4py import MPI  # Horovod's shutdown() then leaves MPI alone, and init() works again

import zerohvd.torch as zero

assert MPI.Is_initialized()
STAGE = int(sys.argv[1])


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    options = {"units": torch.nn.Linear, "persist_below": 3} if STAGE == 3 else {}
    return zero.zeroify(model, torch.optim.Adam(model.parameters()), stage=STAGE, **options)


def train(model, opt):
    for step in range(2):
        opt.zero_grad()
        model(torch.full((2, 5), float(step + hvd.rank()))).sum().backward()
        opt.step()
    with zero.gathered(model):
        return model[0].weight.sum().item()


hvd.init()
first = make()
once = train(*first)
hvd.shutdown()
hvd.init()
train(*first)
assert train(*make()) == once
print("trained again", flush=True)
