"""The trainings behind the torch checkpoints in tests/data/checkpoints-v1.

They use public names of zerohvd only, so that any version can record them:

    mpirun -np 2 python tests/parallel/torch_ranks/old_checkpoints.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

import zerohvd.torch as zero


class SmallNet(nn.Module):
    """Statistics that differ between ranks, a tied, a frozen and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.up = nn.Linear(5, 6)
        self.down = nn.Linear(6, 5, bias=False)
        self.fixed = nn.Parameter(torch.linspace(0, 1, 5), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens)) + self.fixed
        return self.head(self.down(torch.tanh(self.up(x))) * self.scale)


@dataclass(frozen=True)
class Case:
    """A training that is saved after `passes` backward passes."""

    stage: int
    dtype: torch.dtype = torch.float32
    passes: int = 3
    per_step: int = 1

    def build(self, seed: int = 0, stage: int | None = None) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        model = SmallNet().to(self.dtype)
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
        model, opt = zero.zeroify(
            model,
            inner,
            stage=self.stage if stage is None else stage,
            bucket_bytes=200,
            backward_passes_per_step=self.per_step,
        )
        return model, opt, schedule

    def train(
        self, model: Any, opt: Any, schedule: Any, passes: range, *, alike: bool
    ) -> list[float]:
        """Returns the losses.

        Args:
            alike: Every rank has the same data, so that results depend on the number of ranks in
                the last bits only.
        """
        losses = []
        for number in passes:
            rng = np.random.default_rng([number, 99 if alike else hvd.rank()])
            tokens, targets = torch.tensor(rng.integers(0, 7, (2, 6)))
            loss = nn.functional.cross_entropy(model(tokens).float(), targets)
            loss.backward()
            losses.append(loss.item())
            if (number + 1) % self.per_step == 0:
                opt.step()
                opt.zero_grad()
                schedule.step()
        return losses

    @property
    def rest(self) -> range:
        """The passes after the checkpoint: two steps are completed."""
        done = self.passes % self.per_step
        return range(self.passes, self.passes - done + 2 * self.per_step)


CASES = {
    "torch-stage2-bf16": Case(2, torch.bfloat16),
    "torch-stage2-accumulating": Case(2, passes=5, per_step=3),
    "torch-stage1-accumulating": Case(1, passes=5, per_step=3),
    "torch-stage3": Case(3),
}


def extra() -> dict[str, Any]:
    return {"epoch": 2, "order": (3, 1), "seen": torch.arange(3), "mean": np.float32(0.5)}


def seed_generators() -> None:
    random.seed(hvd.rank())
    np.random.seed(10 + hvd.rank())
    torch.manual_seed(20 + hvd.rank())


def drawn() -> list[float]:
    """The next number of each generator."""
    return [random.random(), float(np.random.random()), torch.rand(()).item()]


def values(model: Any) -> dict[str, Any]:
    with zero.gathered(model):
        return {n: v.double().tolist() for n, v in model.state_dict().items()}


def record(folder: Path) -> None:
    hvd.init()
    for name, case in CASES.items():
        seed_generators()
        model, opt, schedule = case.build()
        case.train(model, opt, schedule, range(case.passes), alike=False)
        seed_generators()
        zero.save(folder / name, model, opt, extra(), scheduler=schedule, step=case.passes)
        expected = {"drawn": drawn(), "saved": values(model)}
        expected["losses"] = case.train(model, opt, schedule, case.rest, alike=True)
        expected["continued"] = values(model)
        expected["lr"] = opt.param_groups[0]["lr"]
        everyone = hvd.allgather_object(expected, name=name)
        if hvd.rank() == 0:
            # The values of the first rank, and how the other's differ.
            everyone[1] = {
                key: {n: v for n, v in value.items() if v != everyone[0][key][n]}
                if isinstance(value, dict)
                else value
                for key, value in everyone[1].items()
            }
            (folder / f"{name}.json").write_text(json.dumps(everyone) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
