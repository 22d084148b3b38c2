"""A training that commits, and loses ranks.

    zerohvd run --restarts R -- mpirun -np N python elastic_job.py FOLDER STAGE KILLS

Every rank says what it trained on and the loss of each step, and at the end its parameters. KILLS
is JSON, a list of [restart, step, who]: that rank, or those on the host that horovodrun calls so,
are killed by SIGKILL in that step.

Variables: ranks believe to be on the hosts that HOSTS names ("a,a,b"). With DISK, commits of the
first start are also saved as checkpoints there. In the start FAIL_AT_END ranks fail after training.
GROW, "file=line", adds a line to a file in step 6 of the second start, and waits a while.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import zlib
from pathlib import Path

import saying

SAMPLES, BATCH, EPOCHS, EVERY = 46, 4, 3, 4


def hosts() -> None:
    names = os.environ.get("HOSTS", "").split(",")
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    if len(names) > rank and names[rank]:
        socket.gethostname = lambda: names[rank]


def main() -> None:
    hosts()
    import horovod.torch as hvd
    import torch

    import zerohvd.torch as zero

    folder, stage, kills = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    restart = int(os.environ.get("ZEROHVD_RESTART", "0"))
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    net = torch.nn.Sequential(
        torch.nn.Linear(9, 31), torch.nn.BatchNorm1d(31), torch.nn.Tanh(), torch.nn.Dropout(0.2),
        torch.nn.Linear(31, 5), torch.nn.Linear(5, 1),
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 9), torch.arange(SAMPLES))
    torch.manual_seed(restart * 100 + hvd.rank())  # of dropout: what a restore must set back
    model, opt = zero.zeroify(net, torch.optim.AdamW(net.parameters(), lr=1e-2), stage=stage)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.9)
    sampler = zero.DistributedSampler(data, seed=3)
    manager = zero.CheckpointManager(os.environ["DISK"]) if "DISK" in os.environ else None

    # Ranks that join later have not been started again.
    restart = int(hvd.allreduce(torch.tensor(restart), op=hvd.Max, name="restart"))

    me = (hvd.rank(), os.environ.get("HOROVOD_HOSTNAME"))

    def say(*words: object) -> None:
        saying.say(folder, hvd.rank(), json.dumps(words))

    @zero.elastic.run
    def train(state):
        say("memory", restart, os.environ.get("ZEROHVD_ELASTIC"))
        say("begins", restart, hvd.size(), state.step)
        while state.epoch < EPOCHS:
            sampler.set_epoch(state.epoch)
            # Else a loader draws from the generator of dropout, once more in a second start.
            own = torch.Generator()
            loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, generator=own)
            for batch in zero.even_steps(loader):
                if any([restart, state.step, who] in kills for who in me):
                    os.kill(os.getpid(), signal.SIGKILL)
                if [restart, state.step, hvd.rank()] == [1, 6, 0] and "GROW" in os.environ:
                    file, _, line = os.environ["GROW"].partition("=")
                    with Path(file).open("a") as hosts:
                        hosts.write(f"{line}\n")
                    time.sleep(4)
                zero.weight(0 if batch is None else len(batch[0]))
                opt.zero_grad()
                loss = torch.zeros(())
                if batch is not None and len(batch[0]) > 1:
                    loss = (model(batch[0]) - torch.sin(batch[1])[:, None]).square().mean()
                    loss.backward()
                opt.step()
                used = [] if batch is None else batch[1].tolist()
                say("step", restart, state.step, state.epoch, used, loss.item())
                state.step += 1
                sampler.advance(BATCH)
                scheduler.step()
                if state.step % EVERY == 0:
                    state.commit()
                    if manager is not None and not restart:
                        extra = state.values()
                        manager.save(state.step, model, opt, scheduler=scheduler, extra=extra)
            state.epoch += 1

    state = zero.elastic.TorchState(
        model, opt, sampler=sampler, scheduler=scheduler, checkpoints=manager, step=0, epoch=0
    )
    train(state)
    with zero.gathered(model) if stage == 3 else torch.no_grad():
        whole = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    say("end", restart, zlib.crc32(whole), opt.param_groups[0]["lr"])
    if os.environ.get("FAIL_AT_END") == str(restart):
        sys.exit(3)


if __name__ == "__main__":
    main()
