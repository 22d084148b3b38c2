"""Memory of a unit: this rank's shards for good, the gathered parameters only while needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from zerohvd.communication.agreement import fail_together
from zerohvd.communication.collectives import Handle
from zerohvd.compression.codecs import Codec
from zerohvd.layout import Layout
from zerohvd.torch.communication import arrays
from zerohvd.torch.communication.collectives import LocalCollectives, TorchCollectives
from zerohvd.torch.communication.packed import packing
from zerohvd.torch.communication.star import TorchStar
from zerohvd.torch.params.buffers import view_in
from zerohvd.torch.params.owned import set_units
from zerohvd.torch.stage3 import placeholder
from zerohvd.torch.stage3.deferred import embody

Fill = Callable[[torch.nn.Parameter, torch.Tensor], None]


class ResizedMemory:
    """A storage whose bytes can be freed and allocated again.

    Autograd saves views of parameters (a transposed weight, say) for the backward pass. A view
    refers to its storage and not to an address, so bytes that are freed after the forward pass and
    gathered again before the backward pass are the ones it sees. torch does not check accesses: a
    view that is read while the bytes are freed is a null pointer.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.storage = torch.UntypedStorage(nbytes, device=device)
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return self.storage.nbytes()

    def allocate(self) -> None:
        """Allocate the bytes, with undefined values, unless they are there."""
        if not self.nbytes:
            self.storage.resize_(self._nbytes)

    def free(self) -> None:
        self.storage.resize_(0)


class _Group(NamedTuple):
    """Buckets that share one allocation: a parameter cut into several of them is contiguous."""

    dtype: torch.dtype
    device: torch.device
    buckets: list[int]
    lengths: list[int]  # elements, padded

    @property
    def nbytes(self) -> int:
        return sum(self.lengths) * self.dtype.itemsize


class _Whole(NamedTuple):
    """All parameters of a unit in one place."""

    flats: list[torch.Tensor]  # per bucket: 1-D, padded
    views: dict[int, torch.Tensor]  # per parameter, by its index: in its shape


class UnitFlats:
    """Parameters of a unit that are sharded together. Takes the place of FlatParams at stage 3.

    Gathered parameters lie in storages that are resized to zero and back. While they are lent to
    user code (`lend`), they lie in ordinary memory instead: views that the user keeps stay valid.
    """

    flats: list[torch.Tensor]  # per bucket: 1-D, padded; without bytes while sharded
    shards: list[torch.Tensor]  # per bucket: 1-D, this rank's part
    memories: list[ResizedMemory]  # the allocations behind `flats`
    replicated = False

    def __init__(
        self,
        layout: Layout,
        params: Sequence[torch.nn.Parameter],
        rank: int,
        collectives: TorchCollectives | LocalCollectives,
        prefix: str,
        fill: Fill,
        codec: Codec | None = None,
    ) -> None:
        """
        Args:
            fill: Writes the first values of a parameter into memory; called on the first rank,
                whose values every rank gets.
            codec: Packs the parameters when they are gathered; None: nothing does.
        """
        self.layout = layout
        self._codec = codec
        self._rank = rank
        self._collectives = collectives
        self._prefix = prefix
        self._lengths = [b.lengths for b in layout.buckets]
        self._names = [layout.op_name(prefix, b.index, "allgather") for b in layout.buckets]
        self._members = [
            (i, p) for i, p in enumerate(params) if layout.slots_of[i]
        ]  # empty parameters have nothing to shard
        self._groups = _groups(layout, params)
        self.memories = [ResizedMemory(g.nbytes, g.device) for g in self._groups]
        self._own = self._lay_out(memory.storage for memory in self.memories)
        self.flats = self._own.flats
        self._shown: _Whole | None = None  # where the parameters lie now; None: sharded
        self._pinned = False  # the own memory must stay though other memory is shown
        self._placeholders = {i: placeholder.data_for(v) for i, v in self._own.views.items()}
        self._fill(fill)
        self.shards = self._share()
        for index, param in self._members:
            if param.is_meta:
                embody(param, self._own.views[index])
        self.show()
        self.free()

    def _lay_out(self, storages: Iterable[torch.UntypedStorage]) -> _Whole:
        """Return views of one storage per group."""
        flats = [torch.empty(0)] * len(self.layout.buckets)
        for group, storage in zip(self._groups, storages, strict=True):
            like = torch.empty(0, dtype=group.dtype, device=group.device)
            whole = like.set_(storage, 0, (sum(group.lengths),), (1,))
            for b, flat in zip(group.buckets, whole.split(group.lengths), strict=True):
                flats[b] = flat
        return _Whole(flats, {i: self._view(flats, i, p.shape) for i, p in self._members})

    def _view(self, flats: Sequence[torch.Tensor], index: int, shape: torch.Size) -> torch.Tensor:
        b, slot = self.layout.slots_of[index][0]
        return view_in(flats[b], slot.start, shape)

    def _part(self, flats: Sequence[torch.Tensor], b: int) -> torch.Tensor:
        """Return this rank's part of a gathered bucket."""
        span = self.layout.buckets[b].span(self._rank)
        return flats[b][span.start : span.stop]

    def _fill(self, fill: Fill) -> None:
        """Write the first values on the first rank; raise on all ranks if that fails."""
        for flat in self.flats:
            flat.zero_()  # padding is zero for ever, as every rank's part of it is
        complaint = (
            "the first rank could not make the first values of the parameters of this unit: "
            f"{', '.join(p.name for p in self.layout.params[:3])}, ... See its error"
        )
        with fail_together(self._collectives, complaint, name=f"{self._prefix}/filled"):
            for i, param in self._members if self._rank == 0 else ():
                fill(param, self._own.views[i])

    def _share(self) -> list[torch.Tensor]:
        """Broadcast the first rank's values and return a copy of this rank's shards."""
        for b, flat in enumerate(self.flats):
            if isinstance(self._collectives, TorchCollectives):
                self._collectives.broadcast_in_place(flat, name=f"{self._prefix}/b{b}/init")
        return [self._part(self.flats, b).clone() for b in range(len(self.flats))]

    def held(self) -> list[torch.Tensor]:
        """The tensors that hold parameters between two steps: this rank's shards."""
        return self.shards

    def shard(self, b: int, rank: int) -> torch.Tensor:
        return self.shards[b]

    # -- gathered and sharded ---------------------------------------------------------------------

    def allocate(self) -> None:
        for memory in self.memories:
            memory.allocate()

    def gather_start(self) -> list[Handle]:
        """Start the allgather of all buckets. Wait for the handles before `show`."""
        self.allocate()
        return self._gather_start(self.flats, self._codec, "")

    def make_exact(self) -> None:
        """Gather the exact values, for user code: passes use what has been packed. Collective."""
        if self._codec is not None:
            for handle in self._gather_start(self._now, None, "/exact"):
                handle.wait()

    def put_own(self) -> None:
        """Let this rank's part of the gathered parameters be exact."""
        if self._codec is not None:
            for b, shard in enumerate(self.shards):
                self._part(self._now, b).copy_(shard)

    def _gather_start(
        self, flats: Sequence[torch.Tensor], codec: Codec | None, suffix: str
    ) -> list[Handle]:
        found = zip(flats, self.shards, self._lengths, self._names, strict=True)
        if codec is not None:
            return [
                packing.gather_start(self._collectives, codec, shard, flat, lengths, name=name)
                for flat, shard, lengths, name in found
            ]
        return [
            self._collectives.gather_into(flat, shard, lengths, name=f"{name}{suffix}")
            for flat, shard, lengths, name in found
        ]

    def show(self) -> None:
        """Give the parameters their gathered values."""
        self._show(self._own)

    def _show(self, whole: _Whole) -> None:
        for index, param in self._members:
            placeholder.show(param, whole.views[index])
        self._shown = whole

    def hide(self) -> None:
        """Replace the parameters by placeholders; the gathered bytes stay."""
        if self._shown is not None:
            for index, param in self._members:
                name = self.layout.params[index].name
                placeholder.hide(param, self._placeholders[index], name)
        self._shown, self._pinned = None, True

    def free(self) -> None:
        """Replace the parameters by placeholders and free the gathered bytes."""
        self.hide()
        self._pinned = False
        self.free_unused()

    def free_unused(self) -> None:
        """Free the gathered bytes unless the parameters, or a pass, use them."""
        if self._shown is not self._own and not self._pinned:
            for memory in self.memories:
                memory.free()

    def collect(self, star: TorchStar, to: int) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Send the shards to rank `to`; there, return all parameters in memory of their own."""
        storages = []
        for group in self._groups:
            flats = [
                star.collect(self.shards[b], to, name=f"{self._prefix}/b{b}/values")
                for b in group.buckets
            ]
            storages.append(torch.cat(flats).to(group.device).untyped_storage())
        if star.rank != to:
            return {}
        whole = self._lay_out(storages)
        return {param: whole.views[index] for index, param in self._members}

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, which is none of the parameters, lies in the gathered bytes."""
        if isinstance(tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            return False
        storage = arrays.storage_of(tensor)
        return any(storage is memory.storage for memory in self.memories)

    # -- lending to user code ---------------------------------------------------------------------

    def lend(self, *, keep_own: bool) -> None:
        """Show the parameters in ordinary memory, which views keep alive as everywhere in torch.

        Args:
            keep_own: A pass under way has saved views of the resized memory.
        """
        lent = self._lay_out(memory.storage.clone() for memory in self.memories)
        self._show(lent)
        self._pinned = keep_own
        self.free_unused()

    def pin_own(self) -> None:
        """A backward pass needs the resized memory, which may have been freed by `lend`."""
        if self._shown is not None and self._shown is not self._own and not self._pinned:
            self._copy_back(self._shown)
            self._pinned = True

    def end_loan(self) -> None:
        """Show the parameters in their resized memory again, with what the user has written."""
        if self._shown is not None and self._shown is not self._own:
            self._copy_back(self._shown)
            self._pinned = False
            self.show()

    def _copy_back(self, lent: _Whole) -> None:
        self.allocate()
        for flat, values in zip(self.flats, lent.flats, strict=True):
            flat.copy_(values)

    # -- values written by others -----------------------------------------------------------------

    def keep(self) -> None:
        """Copy this rank's part of the gathered parameters into its shards."""
        for b, shard in enumerate(self.shards):
            shard.copy_(self._part(self._now, b))

    def put(self) -> None:
        """Allocate the gathered bytes, with this rank's shards in place: for loading."""
        self.allocate()
        for b, shard in enumerate(self.shards):
            self._part(self.flats, b).copy_(shard)

    def broadcast(self, root: int) -> None:
        """Overwrite the gathered parameters with those of rank `root`."""
        if isinstance(self._collectives, TorchCollectives):
            for b, flat in enumerate(self._now):
                self._collectives.broadcast_in_place(
                    flat, root, name=f"{self._prefix}/b{b}/written"
                )

    def changed(self) -> str | None:
        """Return the name of a parameter whose gathered values differ from this rank's shard."""
        for b, shard in enumerate(self.shards):
            part = self._part(self._now, b)
            if not torch.equal(part.view(torch.uint8), shard.view(torch.uint8)):
                return self.layout.params[self.layout.buckets[b].slots[0].param].name
        return None

    @property
    def _now(self) -> list[torch.Tensor]:
        """The flats behind the gathered parameters."""
        return self.flats if self._shown is None else self._shown.flats

    def dissolve(self) -> None:
        """Give the parameters, which are gathered now, memory of their own for good."""
        for _, param in self._members:
            param.data = param.data.clone()
            set_units(param, None)
        self._shown = None

    def moved(self) -> int | None:
        """Return the index of the first parameter that has been given other memory."""
        for index, param in self._members:
            if placeholder.is_placeholder(param):
                if self._shown is not None:
                    return index
            elif self._shown is None or param.data_ptr() != self._shown.views[index].data_ptr():
                return index
        return None

    @property
    def params(self) -> list[torch.nn.Parameter]:
        return [param for _, param in self._members]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of gathered parameters now."""
        lent = self._shown is not None and self._shown is not self._own
        held = sum(group.nbytes for group in self._groups) if lent else 0
        return held + sum(memory.nbytes for memory in self.memories)


def _groups(layout: Layout, params: Sequence[torch.nn.Parameter]) -> list[_Group]:
    groups: dict[tuple[torch.dtype, torch.device], _Group] = {}
    for bucket in layout.buckets:
        first = params[bucket.slots[0].param]
        device = torch.device("cpu") if first.is_meta else first.device
        key = arrays.dtype_of(bucket.dtype), device
        group = groups.setdefault(key, _Group(*key, [], []))
        group.buckets.append(bucket.index)
        group.lengths.append(bucket.padded)
    return list(groups.values())
