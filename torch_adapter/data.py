"""Data for ranks whose shares are not equal: every sample once, and no rank left waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import horovod.torch as hvd
import torch

from zerohvd.training.samples import SampleShare, padded


class DistributedSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its share of a dataset, every sample exactly once.

    Other than torch's sampler of this name it neither repeats nor drops samples, so shares may
    differ by one. Use it with `even_steps` and `zero.weight`, and the result is that of one
    process on all samples.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; Horovod's unless given.
        rank: This rank; Horovod's unless given.
        shuffle: Another order in every epoch, the same on all ranks; see `set_epoch`.
        seed: Of the order; must be the same on all ranks.

    Attributes:
        share: This rank's share of the samples.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.num_replicas = hvd.size() if num_replicas is None else num_replicas
        self.rank = hvd.rank() if rank is None else rank
        self.share = SampleShare(len(dataset), self.num_replicas, self.rank)
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self._shuffle:
            generator = torch.Generator("cpu").manual_seed(self._seed + self.epoch)
            order = torch.randperm(self.share.samples, generator=generator, device="cpu")
        else:
            order = torch.arange(self.share.samples, device="cpu")
        return iter(order[self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        return len(self.share)

    @property
    def largest_share(self) -> int:
        """Samples of the rank that has most."""
        return self.share.largest

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently; call it before each epoch, on all ranks."""
        self.epoch = epoch


def even_steps(loader: torch.utils.data.DataLoader[Any]) -> Iterator[Any]:
    """The batches of `loader`, then None until every rank has had the same number of steps.

        for batch in zero.even_steps(loader):
            zero.weight(0 if batch is None else len(batch[0]))
            if batch is not None:
                loss_of(batch).backward()
            opt.step()

    Args:
        loader: A DataLoader whose sampler is a `zero.DistributedSampler`.
    """
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler):
        raise TypeError(
            "even_steps needs a DataLoader(..., sampler=zero.DistributedSampler(dataset)); its "
            f"sampler is a {type(sampler).__name__}"
        )
    if loader.batch_size is None:
        raise ValueError("even_steps needs a DataLoader with a batch_size")
    steps = sampler.share.most_steps(loader.batch_size, drop_last=loader.drop_last)
    return padded(loader, steps)
