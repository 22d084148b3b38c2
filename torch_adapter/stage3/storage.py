"""The memory of a unit: this rank's shards for good, the whole only while it is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from zerohvd.errors import DisagreementError
from zerohvd.layout import Layout
from zerohvd.torch import pages
from zerohvd.torch.communication import arrays
from zerohvd.torch.communication.collectives import Handle, LocalCollectives, TorchCollectives
from zerohvd.torch.stage3 import placeholder
from zerohvd.torch.stage3.deferred import embody

Fill = Callable[[torch.nn.Parameter, torch.Tensor], None]


class UnitFlats:
    """Takes the place of FlatParams where parameters are sharded.

    `flats` are views of one allocation per dtype, whose bytes come and go. Autograd saves views of
    parameters (a transposed weight, say) for the backward pass, and a view knows its allocation,
    not its address: bytes that are freed after the forward pass and gathered again before the
    backward pass are the ones that it sees.
    """

    flats: list[torch.Tensor]  # per bucket: 1-D, padded; without bytes while sharded
    shards: list[torch.Tensor]  # per bucket: 1-D, this rank's part; may lie inside of the flat
    memories: list[pages.Range | pages.Resized]  # the allocations behind `flats`

    def __init__(
        self,
        layout: Layout,
        params: Sequence[torch.nn.Parameter],
        rank: int,
        collectives: TorchCollectives | LocalCollectives,
        prefix: str,
        fill: Fill,
    ) -> None:
        """
        Args:
            fill: Writes the first values of a parameter into memory; asked on the first rank,
                whose values everyone gets.
        """
        self.layout = layout
        self._rank = rank
        self._collectives = collectives
        self._prefix = prefix
        self._lengths = [[span.length for span in b.spans()] for b in layout.buckets]
        self._names = [
            f"{prefix}/b{b.index}/allgather/{layout.params[b.slots[0].param].name}"
            for b in layout.buckets
        ]
        self._members = [
            (i, p) for i, p in enumerate(params) if layout.slots_of[i]
        ]  # empty parameters have nothing to shard
        self._inside: set[int] = set()  # buckets whose shard lies in the flat, never to be copied
        self._guards = 0
        self._guarded: dict[int, torch.Tensor] = {}  # values of such shards, by bucket
        self._allocate(params)
        self._views = {i: self._view(i, p) for i, p in self._members}
        self._stand_ins = {i: placeholder.stand_in(v) for i, v in self._views.items()}
        self._fill(fill, rank)
        self._share()
        for index, param in self._members:
            if param.is_meta:
                embody(param, self._views[index])
        # Each parameter's gradients come this way, and it refers to the parameter. It must not
        # come and go: references are counted.
        self._ways = [
            torch.autograd.graph.get_gradient_edge(p) for _, p in self._members if p.requires_grad
        ]
        self.show()
        self._references = self._count_references()  # when nobody else can have any
        self.free()

    def _allocate(self, params: Sequence[torch.nn.Parameter]) -> None:
        buckets = self.layout.buckets
        self.flats = [torch.empty(0)] * len(buckets)
        self.shards = list(self.flats)
        self.memories = []
        alike: dict[tuple[str, torch.device], list[int]] = {}
        for bucket in buckets:
            device = _real_device(params[bucket.slots[0].param])
            alike.setdefault((bucket.dtype, device), []).append(bucket.index)
        for (dtype, device), indices in alike.items():
            lengths = [buckets[b].padded for b in indices]
            like = torch.empty(0, dtype=arrays.dtype_of(dtype), device=device)
            kept = self._kept(indices, like)
            memory = pages.make(sum(lengths) * like.element_size(), device, kept)
            memory.allocate()
            whole = like.set_(memory.storage, 0, (sum(lengths),))
            whole.zero_()  # padding is zero for ever, as every rank's part of it is
            for b, flat in zip(indices, whole.split(lengths), strict=True):
                self.flats[b] = flat
            for b, part in zip(indices, memory.kept, strict=False):
                self.shards[b] = part.view(like.dtype)
                self._inside.add(b)
            self.memories.append(memory)

    def _kept(self, indices: Sequence[int], like: torch.Tensor) -> list[tuple[int, int]]:
        """Where this rank's shards lie in the whole of these buckets, in bytes, if they may."""
        # An allgather of Horovod must not read where it writes; two ranks just send to each other.
        if self._collectives.size > 2 or not pages.can_keep(len(indices), like.device):
            return []
        buckets = [self.layout.buckets[b] for b in indices]
        starts = itertools.accumulate((bucket.padded for bucket in buckets), initial=0)
        spans = [b.span(self._rank).shift(s) for b, s in zip(buckets, starts, strict=False)]
        size = like.element_size()
        return [(span.start * size, span.stop * size) for span in spans]

    def _own(self, b: int) -> torch.Tensor:
        """This rank's part of the whole."""
        span = self.layout.buckets[b].span(self._rank)
        return self.flats[b][span.start : span.stop]

    def _view(self, index: int, param: torch.nn.Parameter) -> torch.Tensor:
        b, slot = self.layout.slots_of[index][0]
        flat = self.flats[b]
        offset = flat.storage_offset() + slot.start
        whole = flat.new_empty(0).set_(flat.untyped_storage(), offset, (param.numel(),))
        return whole.view(param.shape)

    def _fill(self, fill: Fill, rank: int) -> None:
        error: Exception | None = None
        try:
            for i, param in self._members if rank == 0 else ():
                fill(param, self._views[i])
        except Exception as raised:
            error = raised
        failed = torch.tensor([0.0 if error is None else 1.0])
        self._collectives.allreduce_start(failed, "max", name=f"{self._prefix}/filled").wait()
        if error is not None:
            raise error
        if failed.item():
            raise DisagreementError(
                "the first rank could not make the first values of the parameters of this unit: "
                f"{', '.join(p.name for p in self.layout.params[:3])}, ... See its error"
            )

    def _share(self) -> None:
        """Everyone gets the first rank's values, and keeps a part."""
        for b, flat in enumerate(self.flats):
            if isinstance(self._collectives, TorchCollectives):
                self._collectives.broadcast_in_place(flat, name=f"{self._prefix}/b{b}/init")
            if b not in self._inside:
                self.shards[b] = self._own(b).clone()

    def shard(self, b: int, rank: int) -> torch.Tensor:
        return self.shards[b]

    # -- whole, and back --------------------------------------------------------------------------

    def allocate(self) -> None:
        for memory in self.memories:
            memory.allocate()

    def gather_start(self) -> list[Handle]:
        """Get the other ranks' parts; to be waited for before `show`."""
        self.allocate()
        return [
            self._collectives.gather_into(flat, shard, lengths, name=name)
            for flat, shard, lengths, name in zip(
                self.flats, self.shards, self._lengths, self._names, strict=True
            )
        ]

    def show(self) -> None:
        """Let the parameters be seen, after their bytes have come."""
        for index, param in self._members:
            placeholder.show(param, self._views[index])
        self.whole = True

    def is_referred_to(self) -> bool:
        """Whether something keeps the parameters or their bytes while they are whole: a graph for
        its backward pass, or the user."""
        pairs = zip(self._count_references(), self._references, strict=True)
        return any(now > then for now, then in pairs)

    def _count_references(self) -> list[int]:
        storages = [pages.users(memory.storage) for memory in self.memories]
        return storages + [param._use_count() for _, param in self._members]

    def free(self) -> None:
        """Hide the parameters and give the bytes back."""
        if self.whole:
            for index, param in self._members:
                placeholder.hide(param, self._stand_ins[index], self.layout.params[index].name)
        self.whole = False
        if not self._guards:
            for b, values in self._guarded.items():
                self.shards[b].copy_(values)
            self._guarded = {}
        for memory in self.memories:
            memory.free()

    def guard(self) -> None:
        """From now on, what is written into the whole is kept by `keep` and by nothing else."""
        if not self._guarded:
            self._guarded = {b: self.shards[b].clone() for b in self._inside}
        self._guards += 1

    def unguard(self) -> None:
        """The guard ends; what it has kept comes back when the whole goes."""
        self._guards -= 1

    def keep(self) -> None:
        """Take this rank's part of what stands in the whole."""
        for b, shard in enumerate(self.shards):
            if b not in self._inside:
                shard.copy_(self._own(b))
            elif b in self._guarded:
                self._guarded[b].copy_(shard)

    def put(self) -> None:
        """Bytes for the whole with this rank's part in place: for loading, without others."""
        self.allocate()
        for b, shard in enumerate(self.shards):
            if b not in self._inside:
                self._own(b).copy_(shard)

    def broadcast(self, root: int) -> None:
        """Everyone gets the whole of rank `root`."""
        if isinstance(self._collectives, TorchCollectives):
            for b, flat in enumerate(self.flats):
                self._collectives.broadcast_in_place(
                    flat, root, name=f"{self._prefix}/b{b}/written"
                )

    def changed(self) -> int | None:
        """Index of a parameter of which this rank's part is no longer what is to be kept."""
        for b, shard in enumerate(self.shards):
            kept = self._guarded.get(b, shard)
            if not torch.equal(self._own(b).view(torch.uint8), kept.view(torch.uint8)):
                return self.layout.buckets[b].slots[0].param
        return None

    def dissolve(self) -> None:
        """Give the parameters, which are whole now, memory of their own for good."""
        for index, param in self._members:
            param.data = self._views[index].clone()
            param._zerohvd_units = None
        self.whole = False

    def moved(self) -> int | None:
        """Index of the first parameter that has been given other memory."""
        for index, param in self._members:
            held = placeholder.is_hidden(param)
            if held == self.whole or (
                not held and param.data_ptr() != self._views[index].data_ptr()
            ):
                return index
        return None

    @property
    def params(self) -> list[torch.nn.Parameter]:
        return [param for _, param in self._members]

    @property
    def gathered_nbytes(self) -> int:
        """Of what is there of the whole now, besides shards inside of it."""
        return sum(memory.loose for memory in self.memories if memory.there)


def _real_device(param: torch.nn.Parameter) -> torch.device:
    return torch.device("cpu") if param.is_meta else param.device
