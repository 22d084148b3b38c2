"""python fault_job.py torch|keras FOLDER: trains, saves, writes how far it is, until it fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import relay

framework, folder = sys.argv[1], Path(sys.argv[2])
if framework == "torch":
    import horovod.torch as hvd
    import torch
    from relay_torch import net

    import zerohvd.torch as zero

    hvd.init()
    model = net()
    model, opt = zero.zeroify(model, torch.optim.AdamW(model.parameters()), stage=2)

    def step(x, y):
        opt.zero_grad()
        torch.nn.functional.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        opt.step()
else:
    import horovod.tensorflow as hvd
    import keras
    from relay_keras import net, train

    import zerohvd.keras as zero

    hvd.init()
    model, opt = zero.zeroify(net(), keras.optimizers.AdamW(), stage=2)
    opt.build(model.trainable_variables)

    def step(x, y):
        train(model, opt, x, y)


manager = zero.CheckpointManager(folder / "checkpoints", keep=2)
(folder / f"pid {hvd.rank()}").write_text(str(os.getpid()))
number = 0
while True:
    try:
        step(*relay.data(number, hvd.rank(), hvd.size()))
        number += 1
        if number % 5 == 0:
            manager.save(number, model, opt)
    except Exception as error:
        (folder / f"told {hvd.rank()}").write_text(f"{type(error).__name__}: {error}")
        raise
    (folder / f"step {hvd.rank()}").write_text(str(number))
    time.sleep(0.05)
