"""python relay_torch.py FOLDER STOP, under any launcher; the test runs `plain` itself."""

from __future__ import annotations

import relay
import torch


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    width = relay.WIDTH
    return torch.nn.Sequential(
        torch.nn.Linear(9, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh(),
        torch.nn.Linear(width, 1),
    )  # fmt: skip


def plain(steps: int) -> list[float]:
    """Losses of plain torch on the whole batch."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(steps):
        x, y = map(torch.from_numpy, relay.data(number))
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    import horovod.torch as hvd

    import zerohvd.torch as zero

    hvd.init()

    def make(stage):
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, opt = zero.zeroify(model, opt, stage=stage, bucket_bytes=2048)

        def step(number: int) -> float:
            x, y = map(torch.from_numpy, relay.data(number, hvd.rank(), hvd.size()))
            opt.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            return hvd.allreduce(loss.detach(), name="loss").item()

        return model, opt, step

    relay.run(make, zero, hvd)


if __name__ == "__main__":
    main()
