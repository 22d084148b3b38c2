"""Packed gradients: what leaves, what waits for the next step, and the sum of what has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerohvd.communication.collectives import Handle
from zerohvd.compression.codecs import Codec, codec_of
from zerohvd.compression.feedback import Waiting, pack_with_feedback
from zerohvd.compression.policies import Blocks, Policy, TopK, keeps_errors
from zerohvd.numerics import clip_factor
from zerohvd.torch.communication import two_steps
from zerohvd.torch.communication.collectives import TorchCollectives
from zerohvd.torch.communication.packed import operations, packing


class PackedExchange(NamedTuple):
    """A reducescatter of packed gradients under way."""

    handle: Handle
    codec: Codec
    turn: int
    parts: Sequence[torch.Tensor]  # this rank's part from every rank or host, in order: uint8
    scratch: torch.Tensor  # the memory that was allocated for it
    place: int  # of this rank's own among the parts
    own: torch.Tensor | None  # this rank's own numbers, where these are not packed

    def add_up(self, shard: torch.Tensor, scale: float, *, add: bool) -> None:
        """shard (+)= scale * (sum of all parts), added in rank order, in float32 or wider.

        The own numbers may be the shard itself.
        """
        wide = torch.promote_types(shard.dtype, torch.float32)
        every = [packing.chunks(self.codec, shard.numel(), data) for data in self.parts]
        for chunks in zip(*every, strict=True):
            start, stop = chunks[0].start, chunks[0].stop
            total: torch.Tensor | None = None
            for r, chunk in enumerate(chunks):
                if r == self.place and self.own is not None:
                    part = self.own[start:stop].to(wide)
                else:
                    part = self.codec.unpack(operations, chunk.data, chunk.length, self.turn)
                # Not in place: the first one may be the user's own gradient.
                total = part if total is None else total + part
            assert total is not None
            place = shard[start:stop]
            if add:
                place.add_(total, alpha=scale)
            else:
                place.copy_(total if scale == 1.0 else total * scale)


class _Parts(NamedTuple):
    """What is packed: a part for each rank, or for each host."""

    numbers: torch.Tensor  # 1-D: the parts, one behind the other
    counts: Sequence[int]  # elements of each
    own: int  # the one that stays here


class _Memory(NamedTuple):
    """The bytes of an exchange."""

    sent: torch.Tensor
    received: torch.Tensor
    targets: Sequence[torch.Tensor]  # where each part is packed to; the own one beside `sent`

    @staticmethod
    def of(codec: Codec, parts: _Parts, like: torch.Tensor) -> _Memory:
        sizes = [packing.nbytes(codec, n) for n in parts.counts]
        own = sizes[parts.own]
        sent = like.new_empty(sum(sizes) - own, dtype=torch.uint8)
        targets = list(sent.split([0 if i == parts.own else n for i, n in enumerate(sizes)]))
        targets[parts.own] = sent.new_empty(0 if codec.keeps_own else own)
        return _Memory(sent, sent.new_empty(own * (len(sizes) - 1)), targets)

    def swap(self, collectives: TorchCollectives, ranks: Sequence[int], name: str) -> Handle:
        """Start the alltoall; `ranks` are those that the parts belong to."""
        splits = [0] * collectives.size
        for r, target in zip(ranks, self.targets, strict=True):
            splits[r] = 0 if r == collectives.rank else target.numel()
        return collectives.swap_start(self.sent, splits, self.received, name=name)

    def exchange(self, handle: Handle, codec: Codec, turn: int, parts: _Parts) -> PackedExchange:
        others = len(parts.counts) - 1
        come = list(self.received.chunk(others)) if self.received.numel() else []
        come = come or [self.received] * others
        come.insert(parts.own, self.targets[parts.own])
        own = parts.numbers.split(list(parts.counts))[parts.own] if codec.keeps_own else None
        return PackedExchange(handle, codec, turn, come, self.received, parts.own, own)


class GradPacking:
    """Packs the gradients of one section, bucket by bucket.

    Attributes:
        waiting: Per bucket, what has not travelled, if that is kept: one or two 1-D tensors for
            all parts one behind the other.
    """

    def __init__(
        self,
        policy: Policy,
        lengths: Sequence[Sequence[int]],
        collectives: TorchCollectives,
    ) -> None:
        """
        Args:
            lengths: Per bucket: the elements of each rank's part.
        """
        self._policy, self._lengths, self._collectives = policy, lengths, collectives
        self._rank = collectives.rank
        self._keeps = keeps_errors(policy)
        self._momentum = policy.momentum if isinstance(policy, TopK) else 0.0
        # Rounding errors are small numbers of which a few digits matter.
        narrow = isinstance(policy, Blocks)
        self._dtype = torch.bfloat16 if narrow else torch.float32
        self.waiting: list[list[torch.Tensor]] = [[] for _ in lengths]
        self._turns = [0] * len(lengths)
        self._weighted: bool | None = None

    def forget(self) -> None:
        """Drop what waits: it belongs to other parameters, or to a step that was not made."""
        self.waiting = [[] for _ in self._lengths]

    def tensors(self) -> list[torch.Tensor]:
        return [t for kept in self.waiting for t in kept]

    def start(self, b: int, grads: torch.Tensor, name: str, *, weighted: bool) -> PackedExchange:
        """Send a bucket's gradients, 1-D with padding, of which every rank gets its part."""
        if weighted is not self._weighted:
            self.forget()  # it was multiplied with other weights
            self._weighted = weighted
        turn = self._turns[b]
        self._turns[b] += 1
        codec = codec_of(self._policy, turn)
        assert codec is not None
        lengths = self._lengths[b]
        # On several hosts, numbers are added up inside the host, and what crosses links is packed.
        here = self._collectives.sum_here_start(grads, lengths, name=name)
        if here is None:
            parts = _Parts(grads, lengths, self._rank)
            memory = _Memory.of(codec, parts, grads)
            self._pack(b, codec, parts, memory.targets, turn)
            handle = memory.swap(self._collectives, range(len(lengths)), name)
            return memory.exchange(handle, codec, turn, parts)
        return self._across(b, codec, turn, grads, here, name)

    def _across(
        self,
        b: int,
        codec: Codec,
        turn: int,
        grads: torch.Tensor,
        here: two_steps.SumHere,
        name: str,
    ) -> PackedExchange:
        """The second step, between ranks in the same place of all hosts."""
        counts = [self._lengths[b][r] for r in here.column]
        wide = torch.promote_types(grads.dtype, torch.float32)
        sums = grads.new_empty(sum(counts), dtype=wide)
        parts = _Parts(sums, counts, here.column.index(self._rank))
        memory = _Memory.of(codec, parts, grads)

        def go_on() -> Handle:
            sums.copy_(here.total())
            self._pack(b, codec, parts, memory.targets, turn)
            return memory.swap(self._collectives, here.column, name)

        handle = two_steps.TwoSteps(here.handle, go_on, lambda: None)
        return memory.exchange(handle, codec, turn, parts)

    def _pack(
        self, b: int, codec: Codec, parts: _Parts, targets: Sequence[torch.Tensor], turn: int
    ) -> None:
        scale = self._clip(parts.numbers)
        waits = self._waiting(b, parts.numbers)
        cut = [t.split(list(parts.counts)) for t in (parts.numbers, *waits)]
        for i, (target, grad, *kept) in enumerate(zip(targets, *cut, strict=True)):
            if i == parts.own and codec.keeps_own:
                continue
            for start, stop, data in packing.chunks(codec, grad.numel(), target):
                part = grad[start:stop].to(torch.float32)
                part = part if scale == 1.0 else part * scale
                if not kept:
                    data.copy_(codec.pack(operations, part, turn))
                    continue
                before = Waiting(*(t[start:stop].to(torch.float32) for t in kept))
                packed = pack_with_feedback(
                    operations, codec, part, before, turn, self._momentum
                )
                data.copy_(packed.data)
                for place, value in zip(kept, packed.waiting, strict=False):
                    place[start:stop].copy_(value)

    def _waiting(self, b: int, grads: torch.Tensor) -> list[torch.Tensor]:
        if self._keeps and not self.waiting[b]:
            zeros = torch.zeros_like(grads, dtype=self._dtype)
            self.waiting[b] = [zeros, zeros.clone()] if self._momentum else [zeros]
        return self.waiting[b]

    def _clip(self, grads: torch.Tensor) -> float:
        """What the gradients are multiplied with for `TopK.clip`."""
        if not isinstance(self._policy, TopK) or self._policy.clip is None:
            return 1.0
        wide = torch.promote_types(grads.dtype, torch.float32)
        norm = torch.linalg.vector_norm(grads, dtype=wide)
        return clip_factor(float(norm), self._policy.clip)
