"""The last rank goes elsewhere; the others must find out, say so, and can go on with it later."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from saying import say

import zerohvd.torch as zero

folder = Path(sys.argv[1])
hvd.init()
torch.set_num_threads(1)
bad = hvd.rank() == hvd.size() - 1


def step(model, opt):
    opt.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    opt.step()


def made(stage):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 5))
    opt = torch.optim.AdamW(model.parameters())
    return zero.zeroify(model, opt, stage=stage, bucket_bytes=64)


def go_elsewhere(what):
    try:
        raise ArithmeticError("a bad batch")
    except ArithmeticError:
        hvd.allreduce_async(torch.ones(2), name=f"elsewhere {what}")
    all_have_told(what)


def all_have_told(what):
    while len(list(folder.glob(f"{what} *"))) < hvd.size() - 1:
        time.sleep(0.05)


def others_wait(what, call):
    start = time.monotonic()
    try:
        call()
    except zero.WaitTimeoutError as error:
        seconds = time.monotonic() - start
        say(folder, hvd.rank(), f"{what}: {seconds:.0f} s: {error}")
    (folder / f"{what} {hvd.rank()}").touch()


def act(call, stage, model, opt):
    if call == "step":
        step(model, opt)
    elif call == "save":
        zero.save(folder / "saved", model, opt)
    else:
        made(stage)


for fault in sys.argv[2:]:
    stage, call = int(fault[0]), fault[1:]
    model, opt = made(stage)
    step(model, opt)
    what = f"stage {stage} {call}"
    if bad:
        go_elsewhere(what)
    else:
        others_wait(what, functools.partial(act, call, stage, model, opt))
if not bad:
    all_have_told(what)  # or the end of the first would end Horovod for the others
if not bad and fault.endswith("build"):
    others_wait("again", functools.partial(made, 1))
