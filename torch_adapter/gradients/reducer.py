"""The gradients' way: from the model's full gradients to this rank's reduced shards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch

from zerohvd.communication.collectives import Handle
from zerohvd.compression.policies import Plain
from zerohvd.layout import Bucket, Layout
from zerohvd.numerics import DivideFactors
from zerohvd.torch.communication import arrays
from zerohvd.torch.communication.collectives import Exchange, LocalCollectives, TorchCollectives
from zerohvd.torch.communication.packed.compression import Wires
from zerohvd.torch.gradients.local import LocalGrads
from zerohvd.torch.gradients.packing import GradPacking, PackedExchange
from zerohvd.torch.gradients.shard_buffers import ShardBuffers
from zerohvd.torch.params.buffers import view_in, zero_padding
from zerohvd.training.in_flight import InFlight

# A bucket of the user's travels in this many parts, each a bucket of the layout. Of these, two may
# be on their way while one is filled: full gradients of less than two buckets. Smaller parts cost
# more than they hide: where ranks and Horovod's threads share the cores, every collective waits for
# the scheduler several times.
PARTS_PER_BUCKET = 2
IN_FLIGHT = 2 * PARTS_PER_BUCKET - 2

# Elements that are added up and scaled at a time, before they leave the processor's cache.
_CACHED = 1 << 17


@dataclasses.dataclass
class _Pending:
    bucket: int
    sent: torch.Tensor  # the whole local gradient
    exchange: Exchange | PackedExchange

    @property
    def handle(self) -> Handle:
        return self.exchange.handle


class GradReducer(InFlight[_Pending]):
    """Reduces the gradients of one Layout, bucket by bucket, in the order it is told.

    Stage 2 frees a full gradient as soon as its bucket has gone and keeps the reduced shards in
    memory of their own. Stages 0 and 1 keep full gradients, and the reduced shard replaces this
    rank's own part of them.
    """

    shards: list[torch.Tensor | None]  # per bucket: 1-D, this rank's reduced gradient

    def __init__(
        self,
        layout: Layout,
        params: Sequence[torch.nn.Parameter],
        local: LocalGrads,
        collectives: TorchCollectives | LocalCollectives,
        *,
        stage: int,
        prefix: str,
        wires: Wires,
        shard_dtypes: Sequence[torch.dtype],
        factors: DivideFactors,
    ) -> None:
        super().__init__(IN_FLIGHT)
        self._layout = layout
        self._params, self._local = params, local
        self._collectives = collectives
        self._stage = stage
        self._rank = collectives.rank if layout.size > 1 else 0
        self._wire = wires.dtype
        self._shard_dtypes = shard_dtypes
        self._factors = factors
        self._names = [layout.op_name(prefix, b.index, "reducescatter") for b in layout.buckets]
        self._lengths = [b.lengths for b in layout.buckets]
        self.packing: GradPacking | None = None  # None: gradients travel as numbers
        if not isinstance(wires.grads, Plain) and isinstance(collectives, TorchCollectives):
            self.packing = GradPacking(wires.grads, self._lengths, collectives)
        # The gradient of such a parameter is its buckets: nothing has to be copied.
        self._exact = [
            all(layout.buckets[b].padded == slot.length for b, slot in slots)
            for slots in layout.slots_of
        ]
        self._flats: list[torch.Tensor | None] = [None] * len(layout.buckets)
        self._filled: list[set[int]] = [set() for _ in layout.buckets]
        self.shards = [None] * len(layout.buckets)
        self._buffers = ShardBuffers(
            [lengths[self._rank] for lengths in self._lengths],
            shard_dtypes,
            [params[b.slots[0].param].device for b in layout.buckets],
        )
        # Two ranks at stage 2 keep what they have received from each other as the shard. It is
        # allocated when activations are freed, so that the peak of a step is lower.
        self._keeps_received = stage == 2 and layout.size == 2
        self.weight: float | None = None  # of this rank in this step
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step: the next result replaces the shard, later ones add to it."""
        self._fresh = [False] * len(self._layout.buckets)
        self.arrived: set[int] = set()  # parameters with a gradient in this step

    def take(self, index: int) -> None:
        """Put the finished gradient of a parameter where its buckets will find it."""
        self.reap()
        grad = self._local[index]
        if grad is None:
            return
        self.arrived.add(index)
        if grad.requires_grad:
            grad = self._local[index] = grad.detach()  # of a backward pass with create_graph=True
        if grad.is_sparse:
            grad = self._local[index] = grad.to_dense()
        if self._exact[index]:
            if not grad.is_contiguous():
                self._local[index] = grad.contiguous()
            return
        flat_grad = grad.reshape(-1)
        for b, slot in self._layout.slots_of[index]:
            target = self._flat(b)[slot.start : slot.start + slot.length]
            source = flat_grad[slot.param_start : slot.param_start + slot.length]
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
            self._filled[b].add(index)
        self._local[index] = None if self._stage >= 2 else self._view_of(index)

    def send(self, b: int) -> None:
        """Start the reduction of a bucket; gradients that never came count as zero."""
        self.finish_earlier(b)  # or its name would be in flight twice
        bucket = self._layout.buckets[b]
        source = self._source(bucket)
        sent = self._weighed(source)
        name = self._names[b]
        exchange: Exchange | PackedExchange
        if self._stage == 0:
            exchange = self._allreduce(sent, name)
        elif self.packing is not None:
            exchange = self.packing.start(b, sent, name, weighted=self.weight is not None)
        else:
            into = None
            if self.shards[b] is None and self._stage >= 2 and not self._keeps_received:
                into = self._buffers.shard(b)
            exchange = self._collectives.exchange_start(
                sent, self._lengths[b], name=name, into=into
            )
        if self._stage < 2:
            self._keep_shard_in(b, bucket, source)
        self.pending.append(_Pending(b, sent, exchange))

    def drop_full(self) -> None:
        """Let go of full gradients that are partly reduced by now: nothing that a user could
        read, clip or add to."""
        if self._stage == 1:
            for index in range(len(self._params)):
                self._local[index] = None

    def release(self, *, keep_buffers: bool = True) -> None:
        """Drop the gradients. The buffers of the shards stay for the next step."""
        self.shards = [None] * len(self._layout.buckets)
        self._flats = [None] * len(self._layout.buckets)
        self._filled = [set() for _ in self._layout.buckets]
        self._buffers.release(keep=keep_buffers)

    def show_to_user(self) -> None:
        """Note that user code can see the shards, and may keep them beyond `release`."""
        self._buffers.seen_by_user = True

    def _weighed(self, source: torch.Tensor) -> torch.Tensor:
        """What goes out for `source`: scaled, in the wire's dtype."""
        before = self._factors.before * (1.0 if self.weight is None else self.weight)
        wire = source.dtype if self._wire is None else self._wire
        if self.weight is not None and wire == torch.float16:
            wire = torch.float32  # a gradient times a number of samples leaves float16's range
        if wire != source.dtype:
            source = source.to(wire)
        return source if before == 1.0 else source.mul_(before)

    def has_sum(self, b: int) -> bool:
        """Whether the shard of a bucket holds gradients of the step under way."""
        return self._fresh[b] and self.shards[b] is not None

    def new_sum(self, b: int) -> torch.Tensor:
        """Memory for the reduced gradients of a bucket, all zero."""
        like = self._params[self._layout.buckets[b].slots[0].param]
        length, dtype = self._lengths[b][self._rank], self._shard_dtypes[b]
        return torch.zeros(length, dtype=dtype, device=like.device)

    def put_sum(self, b: int, shard: torch.Tensor) -> None:
        """Begin the step with these reduced gradients: later ones add to them."""
        self.shards[b] = shard
        self._fresh[b] = True

    def gradients(self) -> list[torch.Tensor]:
        """Every tensor held here that holds gradients."""
        held = [*self.shards, *self._flats, *(p.sent for p in self.pending)]
        return [t for t in held if t is not None]

    def scratch(self) -> list[torch.Tensor]:
        """Every tensor held here that holds no gradients: memory of exchanges, idle buffers."""
        waiting = [] if self.packing is None else self.packing.tensors()
        return [*(p.exchange.scratch for p in self.pending), *self._buffers.tensors, *waiting]

    def forget_errors(self) -> None:
        """Drop what has not travelled of the gradients of earlier steps."""
        if self.packing is not None:
            self.packing.forget()

    def _allreduce(self, sent: torch.Tensor, name: str) -> Exchange:
        if sent.dtype == torch.bfloat16 and self._collectives.size > 1:
            sent = arrays.float32(sent)
        handle = self._collectives.allreduce_start(sent, name=name)
        return Exchange(handle, [sent], sent.new_empty(0))

    def _source(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's full local gradient: 1-D, padded."""
        slot = bucket.slots[0]
        if not self._exact[slot.param]:
            return self._filled_flat(bucket)
        param, grad = self._params[slot.param], self._local[slot.param]
        if grad is None:
            if self._stage >= 2:
                return param.data.new_zeros(bucket.padded)
            grad = self._local[slot.param] = torch.zeros_like(param.data)
        source = grad.view(-1)[slot.param_start : slot.param_start + slot.length]
        if self._stage >= 2 and slot.param_start + slot.length == param.numel():
            self._local[slot.param] = None
        return source

    def _filled_flat(self, bucket: Bucket) -> torch.Tensor:
        flat, filled = self._flat(bucket.index), self._filled[bucket.index]
        for slot in bucket.slots:
            if slot.param not in filled:
                flat[slot.start : slot.start + slot.length].zero_()
                if self._stage < 2:
                    self._local[slot.param] = self._view_of(slot.param)
        filled.clear()
        if self._stage >= 2:
            self._flats[bucket.index] = None
        return flat

    def _flat(self, b: int) -> torch.Tensor:
        flat = self._flats[b]
        if flat is None:
            flat = self._allocate(b)
        return flat

    def _allocate(self, b: int) -> torch.Tensor:
        bucket = self._layout.buckets[b]
        like = self._params[bucket.slots[0].param].data
        # Below stage 2, a chunked parameter's gradient is one view, as the parameter itself is.
        chain = self._layout.chain_of(b) if self._stage < 2 else [b]
        lengths = [self._layout.buckets[i].padded for i in chain]
        whole = like.new_empty(sum(lengths))
        for i, flat in zip(chain, whole.split(lengths), strict=True):
            zero_padding(flat, self._layout.buckets[i])
            self._flats[i] = flat
        allocated = self._flats[b]
        assert allocated is not None
        return allocated

    def _view_of(self, index: int) -> torch.Tensor:
        """The parameter's gradient inside the flat buffers of stages 0 and 1."""
        b, slot = self._layout.slots_of[index][0]
        return view_in(self._flat(b), slot.start, self._params[index].shape)

    def _keep_shard_in(self, b: int, bucket: Bucket, source: torch.Tensor) -> None:
        if source.dtype == self._shard_dtypes[b]:
            span = bucket.span(self._rank)
            self.shards[b] = source[span.start : span.stop]

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        return self._collectives.log.waiting(self._names[self.pending[0].bucket])

    def complete(self, pending: _Pending) -> None:
        pending.exchange.handle.wait()
        b = pending.bucket
        shard = self.shards[b]
        if shard is None:
            shard = self.shards[b] = self._new_shard(b, pending.exchange.scratch)
        scale, add = self._factors.after, self._fresh[b]
        if isinstance(pending.exchange, PackedExchange):
            pending.exchange.add_up(shard, scale, add=add)
        else:
            _combine(shard, pending.exchange.parts, scale, add=add)
        self._fresh[b] = True

    def _new_shard(self, b: int, scratch: torch.Tensor) -> torch.Tensor:
        """Memory for the sum; what has been received from the one other rank, if it fits."""
        length, dtype = self._lengths[b][self._rank], self._shard_dtypes[b]
        if scratch.numel() == length and scratch.dtype == dtype:
            return scratch
        return self._buffers.shard(b)


def _combine(
    shard: torch.Tensor, parts: Sequence[torch.Tensor], scale: float, *, add: bool
) -> None:
    """shard (+)= scale * (parts[0] + parts[1] + ...), added in rank order, in shard's dtype.

    One of the parts may be the shard itself, but only of two or fewer.
    """
    if add:
        total = parts[0].to(shard.dtype)
        for part in parts[1:]:
            total += part
        shard.add_(total, alpha=scale)
        return
    for total, *pieces in zip(*(t.split(_CACHED) for t in (shard, *parts)), strict=True):
        if len(pieces) > 1 and pieces[0].dtype == total.dtype:
            torch.add(pieces[0], pieces[1], out=total)
            rest = pieces[2:]
        else:
            total.copy_(pieces[0])
            rest = pieces[1:]
        for piece in rest:
            total.add_(piece)
        if scale != 1.0:
            total.mul_(scale)
