"""A section: parameters that share a layout, with their memory, masters, pieces and gradients."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerohvd.communication.agreement import check_agreement
from zerohvd.communication.collectives import Handle
from zerohvd.compression.codecs import Codec, codec_of
from zerohvd.config import ZeroConfig
from zerohvd.layout import Layout, ParamSpec, Piece, build_layout
from zerohvd.numerics import DivideFactors, master_dtype
from zerohvd.schedule import Schedule
from zerohvd.torch.communication import arrays
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.communication.packed import packing
from zerohvd.torch.communication.packed.compression import Wires
from zerohvd.torch.gradients.local import LocalGrads
from zerohvd.torch.gradients.reducer import PARTS_PER_BUCKET, GradReducer
from zerohvd.torch.gradients.stand_in import make_share
from zerohvd.torch.params.buffers import FlatParams, piece_view
from zerohvd.torch.params.owned import (
    MakeMemory,
    NamedParam,
    OwnedPiece,
    ParamMemory,
    check_free,
    set_optimizer,
)

MakeMaster = Callable[[torch.Tensor, torch.dtype], torch.Tensor | None]


def lay_out(specs: Sequence[ParamSpec], config: ZeroConfig, size: int) -> Layout:
    """The layout of a section on `size` ranks. Plans are made from it as well."""
    return build_layout(
        specs,
        # Plain data parallelism is the layout of a single rank on every rank.
        1 if config.stage == 0 else size,
        bucket_bytes=max(1, config.bucket_bytes // PARTS_PER_BUCKET),
        partition=config.partition,
    )


def _in_place(shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    return None if dtype == shard.dtype else shard.to(dtype)


def _bucket_of(owned: OwnedPiece) -> int:
    return owned.piece.bucket


class Section:
    """Parameters that share a layout. Only `gather_start` and the reducer communicate.

    Attributes:
        layout: Where each parameter lives.
        flat: The memory behind the layout.
        masters: Per bucket: this rank's shard in the dtype that the optimizer updates; None where
            that is the parameters' own.
        owned: This rank's pieces, in the layout's order.
        local: The full gradients that this rank has computed.
        reducer: Reduces the gradients.
        schedule: When a bucket may go.
    """

    def __init__(
        self,
        named: Sequence[NamedParam],
        collectives: TorchCollectives | LocalCollectives,
        config: ZeroConfig,
        *,
        prefix: str,
        wires: Wires,
        factors: DivideFactors,
        settings: dict[str, Any],
        memory: MakeMemory | None = None,
        master: MakeMaster | None = None,
    ) -> None:
        """
        Args:
            memory: Where the parameters live; flat buffers that hold them whole unless given.
            master: Makes what the optimizer updates in the place of a shard, in a dtype; None for
                the shard itself.
        """
        self.named = tuple(named)
        for n in named:
            check_free(n)
        self.params = [n.param for n in named]
        self._collectives = collectives
        self.layout: Layout = lay_out([n.spec for n in named], config, collectives.size)
        check_agreement(collectives, self.layout, settings)
        self.rank = collectives.rank if self.layout.size > 1 else 0
        self.buckets = range(len(self.layout.buckets))
        self._names = [self.layout.op_name(prefix, b, "allgather") for b in self.buckets]
        self._lengths = [b.lengths for b in self.layout.buckets]
        self.flat: ParamMemory = (memory or FlatParams)(self.layout, self.params)
        travels = self.flat.replicated and self.layout.size > 1
        self._codec = codec_of(wires.params) if travels else None
        self.masters = self._make_masters(config, master or _in_place)
        # What all ranks have of this rank's parameters, if they travel packed: rounding keeps it
        # apart from the masters, and what the user writes has to be told from that.
        self._known: list[torch.Tensor] = []
        if self._codec is not None:
            self._known = [self.param_shard(b).clone() for b in self.buckets]
        self.owned = [self._own(piece) for piece in self.layout.pieces(self.rank)]
        self.schedule = Schedule(self.layout)
        self.local = LocalGrads(self.params)
        self.reducer = GradReducer(
            self.layout,
            self.params,
            self.local,
            collectives,
            stage=config.stage,
            prefix=prefix,
            wires=wires,
            shard_dtypes=[
                f.dtype if m is None else m.dtype
                for f, m in zip(self.flat.flats, self.masters, strict=True)
            ],
            factors=factors,
        )

    def _make_masters(self, config: ZeroConfig, make: MakeMaster) -> list[torch.Tensor | None]:
        """Per bucket: this rank's shard in the master's dtype; None where it is the params'."""
        masters: list[torch.Tensor | None] = []
        for b, flat in enumerate(self.flat.flats):
            name = master_dtype(arrays.dtype_name(flat), config.master_dtype)
            shard, dtype = self.param_shard(b), arrays.dtype_of(name)
            master = make(shard, dtype)
            if master is None and self._codec is not None:
                master = shard.to(dtype, copy=True)
            masters.append(master)
        return masters

    def param_shard(self, b: int) -> torch.Tensor:
        """This rank's part of bucket `b`, in the parameters' own dtype: 1-D."""
        return self.flat.shard(b, self.rank)

    def _own(self, piece: Piece) -> OwnedPiece:
        b = piece.bucket
        master = self.masters[b]
        shard = self.param_shard(b) if master is None else master
        shape = self.params[piece.param].shape
        view = piece_view(shard, self.layout.buckets[b], self.rank, piece, shape)
        tensor = torch.nn.Parameter(view.detach())
        return OwnedPiece(piece, tensor, make_share(tensor, self.named[piece.param].name))

    def set_piece_grads(self, buckets: range) -> None:
        """Give each piece its reduced gradient; none where the parameter is frozen now, or where
        the user has written `param.grad = None`.

        A parameter that no rank has used gets zeros, as with Horovod: a rank cannot know what
        the others used. A rank on its own can, and leaves the parameter alone as torch does.
        """
        alone = self._collectives.size == 1
        for owned in self._owned_of(buckets):
            piece = owned.piece
            shard = self.reducer.shards[piece.bucket]
            unused = alone and piece.param not in self.reducer.arrived
            unused = unused or self.local.is_dropped(piece.param)
            if shard is None or unused or not self.params[piece.param].requires_grad:
                owned.tensor.grad = None
                continue
            bucket = self.layout.buckets[piece.bucket]
            shape = self.params[piece.param].shape
            grad = piece_view(shard, bucket, self.rank, piece, shape)
            owned.tensor.grad = grad.to(owned.tensor.device)

    def show_shares(self, *, on_their_way: bool) -> None:
        """Let the pieces' `.grad` say that gradients are on their way, or that there are none."""
        for owned in self.owned:
            if not on_their_way or self.params[owned.piece.param].requires_grad:
                owned.tensor.grad = owned.on_its_way if on_their_way else None

    def take_piece_grads(self, buckets: range) -> list[torch.Tensor | None]:
        """Take the gradients away from the pieces of these buckets."""
        grads = []
        for owned in self._owned_of(buckets):
            grads.append(owned.tensor.grad)
            owned.tensor.grad = None
        return grads

    def give_piece_grads(self, buckets: range, grads: Sequence[torch.Tensor | None]) -> None:
        for owned, grad in zip(self._owned_of(buckets), grads, strict=True):
            owned.tensor.grad = grad

    def _owned_of(self, buckets: range) -> Sequence[OwnedPiece]:
        """The pieces in these buckets: they lie in the layout's order."""
        first = bisect_left(self.owned, buckets.start, key=_bucket_of)
        return self.owned[first : bisect_left(self.owned, buckets.stop, first, key=_bucket_of)]

    def set_owner(self, optimizer: Any) -> None:
        """Note which optimizer takes the gradients of these parameters; None: no one any more."""
        for param in self.params:
            set_optimizer(param, optimizer)

    @property
    def param_names(self) -> list[str]:
        return [n.name for n in self.named]

    def frozen(self) -> list[int]:
        """The parameters that require no gradient now."""
        return [i for i, p in enumerate(self.params) if not p.requires_grad]

    def with_gradient(self) -> list[int]:
        """The parameters that hold a gradient which the reducer has not taken."""
        return self.local.present()

    def gather_start(self, buckets: range, *, exactly: bool = False) -> list[Handle]:
        """Publish the updated shards: when all handles have been waited for, the parameters of
        every rank are current. Those of a unit travel when it is needed next.

        Args:
            exactly: Not packed, whatever the policy is.
        """
        under_way: list[Handle] = []
        for b in buckets:
            if self._codec is not None and not exactly:
                under_way.append(self._gather_change(b, self._codec))
                continue
            flat, master = self.flat.flats[b], self.masters[b]
            if master is not None:
                # In the order of the stream: before the allgather, and before the next gradients
                # come to the host, for which the update of this memory waits.
                own = self.param_shard(b)
                own.copy_(master, non_blocking=own.is_cuda and master.is_pinned())
            if self._known:
                self._known[b].copy_(self.param_shard(b))
            if self.layout.size > 1 and self.flat.replicated:
                handle = self._collectives.gather_start(flat, self._lengths[b], name=self._names[b])
                under_way.append(handle)
        return under_way

    def _gather_change(self, b: int, codec: Codec) -> Handle:
        """Publish by how much the masters differ from what all ranks have: that packs better than
        the values, and what rounding leaves over travels in the next step."""
        master = self.masters[b]
        assert master is not None
        own, flat = self.param_shard(b), self.flat.flats[b]
        handle = packing.gather_start(
            self._collectives,
            codec,
            master.to(own.device) - own,
            flat,
            self._lengths[b],
            name=self._names[b],
            add=True,
        )
        return packing.Then(handle, lambda: self._note_known(b))

    def _note_known(self, b: int) -> None:
        self._known[b].copy_(self.param_shard(b))

    @property
    def rounds(self) -> bool:
        """Whether parameters travel packed, and differ from the masters by what rounding left."""
        return self._codec is not None

    def copies(self) -> list[torch.Tensor]:
        """What is held of this rank's parameters besides the parameters."""
        return [*(m for m in self.masters if m is not None), *self._known]

    def refresh_masters(self, buckets: range) -> None:
        """Take over what has been written into 16-bit parameters since the last step.

        Loading a checkpoint and hvd.broadcast_parameters() write them without a trace, so the
        values themselves are compared.
        """
        for b in buckets:
            master = self.masters[b]
            if master is None:
                continue
            own = self.param_shard(b)
            if own.device != master.device:
                own = own.to(master.device)
            known = self._known[b].to(own.device) if self._known else master.to(own.dtype)
            differs = known != own
            if differs.any():
                master[differs] = own[differs].to(master.dtype)
                if self._known:
                    self._note_known(b)

    def drop_unwanted(self) -> None:
        """Take reduced gradients away again where the user has written `param.grad = None`."""
        for owned in self.owned:
            if self.local.is_dropped(owned.piece.param):
                owned.tensor.grad = None

    def check_gradients(self) -> None:
        """Raise if the user has put another tensor in the place of a gradient that has left."""
        index = self.local.replaced()
        if index is not None:
            raise RuntimeError(
                f"the gradient of {self.named[index].name!r} was replaced by another tensor after "
                "backward(), when it had left for the reduction: that tensor would be ignored. "
                "Change it in place (param.grad.copy_(...)), on all ranks, or compute it under "
                "`with opt.no_sync():`"
            )

    def check_in_place(self) -> None:
        index = self.flat.moved()
        if index is not None:
            raise RuntimeError(
                f"parameter {self.named[index].name!r} was given other memory after it had been "
                "sharded (model.to(), .half(), .data = ...). Move or convert the model first, "
                "then make the optimizer; to change values later, write in place "
                "(param.data.copy_(...))."
            )
