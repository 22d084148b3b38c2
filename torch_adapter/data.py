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
        share: This rank's share of the samples that are left of the epoch.
        done: Samples of the epoch, of all ranks, that have been trained on; see `advance`.
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
        self._samples = len(dataset)
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = self.done = 0
        SampleShare(self._samples, self.num_replicas, self.rank)  # raises here

    @property
    def share(self) -> SampleShare:
        return SampleShare(self._samples - self.done, self.num_replicas, self.rank)

    def __iter__(self) -> Iterator[int]:
        if self._shuffle:
            generator = torch.Generator("cpu").manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._samples, generator=generator, device="cpu")
        else:
            order = torch.arange(self._samples, device="cpu")
        return iter(order[self.done :][self.rank :: self.num_replicas].tolist())

    def __len__(self) -> int:
        return len(self.share)

    @property
    def largest_share(self) -> int:
        """Samples of the rank that has most."""
        return self.share.largest

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently; call it before each epoch, on all ranks.

        In the epoch that `load_state_dict` has set, what is left of it comes.
        """
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0

    def advance(self, batch_size: int) -> None:
        """Say that all ranks have trained on their next batch of `batch_size`, or what was left.

        For `state_dict`: an iteration that is under way goes on as it was.
        """
        if batch_size < 0:
            raise ValueError(f"batch_size must be 0 or more, got {batch_size}")
        self.done = min(self._samples, self.done + batch_size * self.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """Where training is: as many ranks as there are then go on with what is left."""
        return {"epoch": self.epoch, "done": self.done, "samples": self._samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was called, at any number of ranks."""
        if state["samples"] != self._samples:
            raise ValueError(
                f"the state of the sampler is of a dataset of {state['samples']} samples; this one "
                f"has {self._samples}"
            )
        self.epoch, self.done = state["epoch"], state["done"]


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
