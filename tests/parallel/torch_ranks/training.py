"""Small models, and plain data parallelism as the oracle."""

from __future__ import annotations

from collections.abc import Callable

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F

import zerohvd.torch as zero

STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Odd sizes, a scalar, an empty parameter and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 37)
        self.norm = nn.LayerNorm(37)
        self.down = nn.Linear(37, 7, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.norm(self.up(x)))) * self.scale
        return self.head(x)


class MatrixNet(nn.Module):
    """All of it is used by every sample, so that a sum over samples is a sum of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.head = nn.Linear(13, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.up(self.embed(tokens))))


def make_model(seed: int = 0, cls: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(seed)
    return cls()


def batch(step: int, rank: int, samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 11, (samples, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = data
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


def train(model: nn.Module, opt, steps: int = 5, first: int = 0) -> None:
    for step in range(first, first + steps):
        opt.zero_grad()
        loss_of(model, batch(step, hvd.rank())).backward()
        opt.step()


Make = Callable[[list], torch.optim.Optimizer]


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def plain(make: Make = adamw, steps: int = 5, cls: type[nn.Module] = Net, **options):
    """The oracle: the same model under hvd.DistributedOptimizer."""
    model = make_model(cls=cls)
    opt = hvd.DistributedOptimizer(
        make(model.parameters()), named_parameters=model.named_parameters(), **options
    )
    train(model, opt, steps)
    return model, opt


def distribute(model: nn.Module, inner: torch.optim.Optimizer, *, stage: int = 2, **options):
    """The sharded optimizer. At stage 3 every layer is a unit, and next to nothing stays whole."""
    if stage == 3:
        layers = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Conv2d)
        if not any(isinstance(m, layers) for m in model.modules()):
            layers = None
        _, opt = zero.zeroify(model, inner, stage=3, units=layers, persist_below=3, **options)
        return opt
    return zero.DistributedOptimizer(
        inner, named_parameters=model.named_parameters(), stage=stage, **options
    )


def sharded(make: Make = adamw, steps: int = 5, cls: type[nn.Module] = Net, **options):
    model = make_model(cls=cls)
    options.setdefault("bucket_bytes", 1024)
    opt = distribute(model, make(model.parameters()), **options)
    train(model, opt, steps)
    return model, opt


def assert_same(a: nn.Module, b: nn.Module, *, exact: bool | None = None, tol: float = 1e-5):
    """Bitwise at 1 and 2 ranks, where sums have one order only; else to tolerance."""
    exact = hvd.size() <= 2 if exact is None else exact
    with zero.gathered(a), zero.gathered(b):
        for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
            if exact:
                assert torch.equal(p, q), f"{name} differs by {(p - q).abs().max()}"
            else:
                torch.testing.assert_close(
                    p, q, rtol=tol * 10, atol=tol, msg=lambda m, n=name: n + m
                )


def assert_replicated(model: nn.Module) -> None:
    """All ranks hold the same parameters, to the bit."""
    with zero.gathered(model):
        for name, p in model.named_parameters():
            if p.numel():
                rows = hvd.allgather(p.detach().reshape(1, -1).double(), name=f"check.{name}")
                assert all(torch.equal(rows[0], row) for row in rows), name
