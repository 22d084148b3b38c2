"""The memory behind a Layout: parameters become views of flat buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerohvd.layout import Bucket, Layout, Piece
from zerohvd.torch.communication import arrays


class FlatParams:
    """One flat tensor per bucket; the parameters of the model are views of them.

    Buckets that hold chunks of one parameter lie side by side in one allocation, so that the
    parameter is contiguous.
    """

    flats: list[torch.Tensor]  # per bucket: 1-D, padded
    replicated = True

    def __init__(self, layout: Layout, params: Sequence[torch.nn.Parameter]) -> None:
        self._layout, self._params = layout, params
        self.flats = []
        for first in layout.buckets:
            chain = layout.chain_of(first.index)
            if first.index != chain[0]:
                continue
            total = sum(layout.buckets[i].padded for i in chain)
            device = params[first.slots[0].param].device
            # Padding must be zero from the start, and parameters overwrite the rest.
            memory = torch.zeros(total, dtype=arrays.dtype_of(first.dtype), device=device)
            self.flats.extend(memory.split([layout.buckets[i].padded for i in chain]))
            for slot in first.slots:
                self._adopt(params[slot.param], memory, slot.start)
        self._addresses = [p.data_ptr() for p in params]

    @staticmethod
    def _adopt(param: torch.nn.Parameter, memory: torch.Tensor, start: int) -> None:
        view = memory[start : start + param.numel()].view(param.shape)
        view.copy_(param.data)
        param.data = view

    def shard(self, b: int, rank: int) -> torch.Tensor:
        """The part of bucket `b` that `rank` owns: 1-D."""
        span = self._layout.buckets[b].span(rank)
        return self.flats[b][span.start : span.stop]

    def moved(self) -> int | None:
        """Index of the first parameter that no longer is a view of its buffer."""
        for index, (param, address) in enumerate(zip(self._params, self._addresses, strict=True)):
            if param.data_ptr() != address:
                return index
        return None

    def held(self) -> list[torch.Tensor]:
        """The tensors that hold the parameters."""
        return self.flats


def zero_padding(flat: torch.Tensor, bucket: Bucket) -> None:
    """Clear what lies between and behind the slots of a buffer that was allocated unclean."""
    for gap in bucket.gaps():
        flat[gap.start : gap.stop].zero_()


def view_in(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Return a tensor of `shape` that begins at element `start` of `flat` and may end behind it.

    A chunked parameter lies in several buckets, side by side in one storage. It is no view in the
    sense of autograd: writes into the buffer must not count as writes into the parameter.
    """
    offset = int(flat.storage_offset()) + start
    # Contiguous without strides, which the stubs of torch ask for.
    return flat.new_empty(0).set_(flat.untyped_storage(), offset, shape)  # type: ignore


def piece_view(
    shard: torch.Tensor, bucket: Bucket, rank: int, piece: Piece, shape: torch.Size
) -> torch.Tensor:
    """The view of `piece` in this rank's shard of its bucket.

    It has the parameter's shape where the parameter is whole, so that optimizers which look at
    rows and columns work on it, and is flat where it was cut.
    """
    start = piece.bucket_span.start - bucket.span(rank).start
    view = shard[start : start + piece.bucket_span.length]
    return view.view(shape) if shape.numel() == view.numel() else view
