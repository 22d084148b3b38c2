"""python count_job.py torch|keras: makes an optimizer, and says how many ranks it has."""

from __future__ import annotations

import sys

if sys.argv[1] == "torch":
    import horovod.torch as hvd
    import torch

    import zerohvd.torch as zero

    hvd.init()
    zero.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1))
else:
    import horovod.tensorflow as hvd
    import keras

    import zerohvd.keras as zero

    hvd.init()
    zero.DistributedOptimizer(keras.optimizers.SGD(0.1))
print(f"trains as rank {hvd.rank()} of {hvd.size()}", flush=True)
