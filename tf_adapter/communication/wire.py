"""Collectives for a training step: named, of static shape, graph-safe.

They run eagerly or are traced into a tf.function.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from zerohvd import limits
from zerohvd.communication.collectives import (
    Collectives,
    HorovodCollectives,
    SingleProcess,
    check_registered,
)
from zerohvd.communication.hosts import Grid
from zerohvd.communication.instances import agree_on_instance
from zerohvd.communication.traffic import PassTraffic, StepTraffic
from zerohvd.compression.codecs import Codec, codec_of
from zerohvd.compression.policies import Plain
from zerohvd.config import ZeroConfig
from zerohvd.devices import check_devices
from zerohvd.keras import compat
from zerohvd.keras.communication import arrays, two_steps
from zerohvd.keras.communication.clock import Clock, measured
from zerohvd.keras.communication.ordering import after
from zerohvd.keras.communication.packed import packing
from zerohvd.peers.watch import watch_next
from zerohvd.rank_count import check_ranks
from zerohvd.schedule import exchange_rounds

# Collectives block inside TensorFlow's kernels, where nobody but Horovod can end them. It reads the
# limit when it is initialised.
_TOO_LATE = limits.end_stalled_collectives(os.environ) and hvd.is_initialized()

_OWN_DEVICE = (
    'tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[hvd.local_rank()], "GPU")'
    " after hvd.init(), before anything else"
)
# A tensor smaller than this may be a constant (a flag, a count, a norm); gradients never are.
_SMALL = 4096
# Elements: TensorFlow slices without a copy at multiples of 64 bytes.
_ALIGN = 16


def join(process_set: Any = None) -> Collectives:
    """Eager collectives of this rank in `process_set`; a rank outside of it is alone."""
    if hvd.is_initialized():
        check_ranks(os.environ, hvd.size())
    if hvd.is_initialized() and process_set is not None:
        check_registered(process_set)
        if not process_set.included():
            return SingleProcess()
    return HorovodCollectives(hvd, arrays, process_set)


class Wire:
    """The ranks of one process set, joined by horovod.tensorflow; all of them must make it."""

    def __init__(self, process_set: Any, config: ZeroConfig) -> None:
        self.eager = join(process_set)  # for agreements outside of graphs
        if _TOO_LATE and self.eager.size > 1 and self.eager.rank == 0:
            warnings.warn(limits.TOO_LATE.format("zerohvd.keras"), stacklevel=2)
        self.rank, self.size = self.eager.rank, self.eager.size
        self._set = hvd.global_process_set if process_set is None else process_set
        # The same name twice at a time is an error, and two optimizers may share a step.
        alone = self.size == 1
        number = 0 if alone else agree_on_instance(self.eager, self._set.process_set_id)
        self.prefix = f"zero.{number}" if number else "zero"
        with tf.init_scope():
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
            self._kept = tf.Variable(0.0, trainable=False, name="kept")
            self._zero = tf.Variable(0.0, trainable=False, name="zero")
            # What this rank wishes, and the sum of what the ranks wished in the last step: see
            # `zerohvd.preemption`.
            self.wish = tf.Variable(0.0, trainable=False, name="wish")
            self.heard = tf.Variable(0.0, trainable=False, name="heard")
        self.clock: Clock | None = None  # measures collectives, if there is a Monitor
        self._marks: dict[str, Any] = {}
        if not alone:
            hosts = self.eager.find_hosts()
            self._check_devices(hosts)
            if self._set.process_set_id == 0 and not limits.is_elastic():
                watch_next(self.eager, hosts)
        self.traffic = self.new_traffic()
        # How gradients and parameters are packed; None: they are not.
        self.packing: packing.GradPacking | None = None
        self.codec: Codec | None = None
        if not alone and not isinstance(config.wire, Plain):
            self.packing = packing.GradPacking(config.wire, self.step)
        if not alone:
            self.codec = codec_of(config.param_compression)

    def _check_devices(self, hosts: Sequence[str]) -> None:
        if not hvd.nccl_built():
            return
        # Ranks may see different GPUs under the same name; TensorFlow takes the first it sees.
        gpus = tf.config.get_visible_devices("GPU")
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        mine = f"{gpus[0].name} of CUDA_VISIBLE_DEVICES={seen}" if gpus else None
        if len(tf.config.list_physical_devices("GPU")) == 1:
            mine = ""  # a cgroup or a container may show each rank another one under this name
        devices = self.eager.allgather_object(mine, name="zero/agree/devices")
        check_devices(hosts, devices, fix=_OWN_DEVICE)

    def new_traffic(self) -> StepTraffic:
        """Start a new record of what is moved."""
        self.traffic = StepTraffic(self.size, self.step, self._marks, _new_mark)
        return self.traffic

    def pass_traffic(self) -> PassTraffic:
        """A record of what layers move, for `recorded_by`."""
        return PassTraffic(self.size, self.step, self._marks, _new_mark)

    @contextlib.contextmanager
    def recorded_by(self, traffic: StepTraffic) -> Iterator[None]:
        """Record there what is moved inside, and not in the step's record."""
        before, self.traffic = self.traffic, traffic
        try:
            yield
        finally:
            self.traffic = before

    def _record(self, name: str, op: str, x: Any, moved: int | None = None) -> None:
        size = (arrays.numel(x), arrays.nbytes(x))
        self.traffic.add(name, op, arrays.dtype_name(x), *size, moved)

    def keep(self, x: Any) -> None:
        """Protect the collective that gives `x` from pruning, on a rank that does not use `x`.

        TensorFlow prunes an operation whose result nobody reads: a deadlock, as the other ranks
        wait in the collective.
        """
        if self.size > 1 and not tf.executing_eagerly():
            known = x.shape.is_fully_defined()
            flat = arrays.flatten(x)
            first = arrays.cut(flat, 0, min(1, arrays.numel(x))) if known else flat[:1]
            self._kept.assign(tf.cast(tf.reduce_sum(first, 0), tf.float32), read_value=False)

    def live(self, x: Any) -> Any:
        """`x` in a form that constant folding does not see through.

        TensorFlow evaluates operations on constants while it optimizes a graph. For a collective
        that is a deadlock: the other ranks are elsewhere.
        """
        if self.size == 1 or tf.executing_eagerly():
            return x
        return x + tf.cast(self._zero, x.dtype)

    @measured
    def reducescatter(self, x: Any, lengths: Sequence[int], name: str) -> Any:
        """The sum over the ranks of this rank's part of `x`; 16-bit floats are added in float32.

        `x` is 1-D, and rank i keeps `lengths[i]` elements.
        """
        if self.size == 1:
            return arrays.widen(x)
        if self.packing is not None:
            return self._pack_and_add(self.packing, x, lengths, name)
        return self._reducescatter(x, lengths, name)

    def _pack_and_add(
        self, packs: packing.GradPacking, x: Any, lengths: Sequence[int], name: str
    ) -> Any:
        """A reducescatter of packed numbers. On several hosts, numbers are added up inside the
        host, and what crosses links is packed."""
        ranks: Sequence[int] = range(self.size)
        grid = self._grid_of(x, sum(lengths))
        if grid is not None:
            moved = sum(grid.scatter[0].splits(lengths)) * arrays.itemsize(x)
            self._record(f"{name}/here", "reducescatter", x, moved=moved)
            x = two_steps.sum_here(self._alltoall, grid, x, lengths, name)
            ranks, lengths = grid.column, [lengths[r] for r in grid.column]
        swap = functools.partial(self._swap, ranks)
        return packs.reducescatter(swap, x, lengths, ranks.index(self.rank), name)

    def _swap(self, ranks: Sequence[int], parts: Sequence[Any], nbytes: int, name: str) -> Any:
        """Send packed parts to these ranks; return what each has sent here: `nbytes`."""
        others = {r: p for r, p in zip(ranks, parts, strict=True) if r != self.rank}
        sizes = [0] * self.size
        for r, part in others.items():
            sizes[r] = 0 if part is None else part.shape[0]
        sent = [part for part in others.values() if part is not None]
        data = tf.concat(sent, 0) if sent else self.live(tf.zeros([0], tf.uint8))
        self._record(name, "reducescatter", data, moved=sum(sizes))
        out = self._alltoall(data, sizes, name)
        out.set_shape([nbytes * len(others)])
        if not nbytes:
            self.keep(tf.cast(out, tf.float32))
        found: list[Any] = [out[i * nbytes : (i + 1) * nbytes] for i in range(len(others))]
        found.insert(ranks.index(self.rank), None)
        return found

    def _reducescatter(self, x: Any, lengths: Sequence[int], name: str) -> Any:
        kept = lengths[self.rank] * arrays.itemsize(x)
        total = sum(lengths) * arrays.itemsize(x)
        self._record(name, "reducescatter", x, moved=total - kept)
        if hvd.nccl_built() and x.dtype not in arrays.NARROW and len(set(lengths)) == 1:
            out = hvd.reducescatter(x, op=hvd.Sum, **self.options(name))
            out.set_shape([lengths[self.rank]])
            return out
        # An alltoall moves the same bytes. MPI's reducescatter allocates a temporary on every call
        # (page faults: measured several times slower), has no bfloat16, and would round 16-bit
        # sums after every rank.
        return self._exchange_and_add(x, lengths, name)

    @measured
    def allreduce(self, x: Any, name: str, op: str = "sum") -> Any:
        """`x` combined over the ranks; 16-bit floats are added and returned in float32."""
        if x.dtype in arrays.NARROW:
            # A reducescatter and an allgather, which is what an allreduce moves.
            flat = arrays.flatten(x)
            share = -(-arrays.numel(x) // self.size)
            padded = tf.pad(flat, [[0, share * self.size - arrays.numel(x)]])
            mine = self._reducescatter(padded, [share] * self.size, f"{name}/reducescatter")
            mine = tf.cast(mine, x.dtype)
            full = self.allgather(mine, [share] * self.size, f"{name}/allgather")
            return tf.reshape(tf.cast(full[: arrays.numel(x)], tf.float32), x.shape)
        if self.size == 1:
            return x
        if arrays.numel(x) < _SMALL:
            x = self.live(x)
        self._record(name, "allreduce", x)
        ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        out = hvd.allreduce(x, op=ops[op], **self.options(name))
        out.set_shape(x.shape)
        return out

    @measured
    def add_flags(self, x: Any, name: str) -> Any:
        """The sum of a few numbers that every step sends; like Horovod's own messages, they are not
        counted as traffic."""
        if self.size == 1:
            return x
        out = hvd.allreduce(self.live(x), op=hvd.Sum, **self.options(name))
        out.set_shape(x.shape)
        return out

    @measured
    def allgather(self, x: Any, lengths: Sequence[int], name: str) -> Any:
        """The parts of all ranks, which are `lengths` long, in rank order."""
        if self.size == 1:
            return x
        grid = self._grid_of(x, sum(lengths))
        if grid is None:
            out = self._gather(x, name)
        else:
            out = two_steps.gather(self._alltoall, grid, x, lengths, self.rank, name)
        out.set_shape([sum(lengths)])
        own = lengths[self.rank] * arrays.itemsize(x)
        self._record(name, "allgather", out, moved=own * (self.size - 1))
        return out

    def allgather_packed(self, x: Any, lengths: Sequence[int], codec: Codec, name: str) -> Any:
        """The same, packed on their way: float32. A rank's own part is what the others get."""
        sizes = [codec.nbytes(length) for length in lengths]
        data = packing.pack(codec, x)
        if not data.shape[0]:
            data = self.live(data)
        return packing.unpack_all(codec, self.allgather(data, sizes, name), lengths)

    @measured
    def allgather_rows(self, x: Any, name: str) -> Any:
        """The rows of all ranks; how many each has, only the running step knows."""
        if self.size == 1:
            return x
        rows, width = tf.shape(x, out_type=tf.int64)[0], math.prod(x.shape[1:])
        item = arrays.itemsize(x)
        self.traffic.add_gathered_rows(name, rows, arrays.dtype_name(x), width, item)
        out = self._gather(x, name)
        out.set_shape([None, *x.shape[1:]])
        return out

    @measured
    def alltoall_rows(self, x: Any, splits: Any, name: str) -> tuple[Any, Any]:
        """Send `splits[i]` rows of `x` to rank i; returns what has come, in rank order, and how
        many rows each rank has sent. Only the running step knows how many there are."""
        if self.size == 1:
            return x, splits
        rows, width = tf.shape(x, out_type=tf.int64)[0], math.prod(x.shape[1:])
        item = arrays.itemsize(x)
        self.traffic.add_sent_rows(name, rows, arrays.dtype_name(x), width, item)
        bits = arrays.bits(x) if x.dtype == tf.bfloat16 else x
        splits = tf.cast(splits, tf.int32)
        out, received = hvd.alltoall(bits, splits=splits, **self.options(name))
        out = arrays.unbits(out) if x.dtype == tf.bfloat16 else out
        out.set_shape([None, *x.shape[1:]])
        return out, received

    def options(self, name: str) -> dict[str, Any]:
        """What one of Horovod's functions needs besides the tensor."""
        # Horovod matches ranks by name. TensorFlow numbers the scopes of branches and loops when
        # it inlines them, on each rank differently: the scope must stay out of the name, and so
        # must the slashes that make one.
        name = name.replace("/", ".")
        return {"name": name, "ignore_name_scope": True, "process_set": self._set}

    def _gather(self, x: Any, name: str) -> Any:
        bits = arrays.bits(x) if x.dtype == tf.bfloat16 else x
        out = hvd.allgather(bits, **self.options(name))
        return arrays.unbits(out) if x.dtype == tf.bfloat16 else out

    def _exchange_and_add(self, x: Any, lengths: Sequence[int], name: str) -> Any:
        """A reducescatter as an alltoall and a local sum."""
        start, own = sum(lengths[: self.rank]), lengths[self.rank]
        grid = self._grid_of(x, sum(lengths))
        if grid is not None:
            return two_steps.scatter(self._alltoall, grid, x, lengths, self.rank, name)
        if self.size > 2:
            return self._add_in_rounds(x, lengths, name)
        # Between two ranks the own part need not travel, and a + b is b + a.
        total = sum(lengths)
        sent = arrays.cut(x, own, total) if self.rank == 0 else arrays.cut(x, 0, start)
        splits = [0 if rank == self.rank else length for rank, length in enumerate(lengths)]
        received = self._alltoall(sent, splits, name)
        received.set_shape([own])
        # tf.add may reuse either operand's buffer for the result: a slice of `x` would then keep
        # all of `x` alive. bias_add never reuses the bias.
        mine = arrays.widen(arrays.cut(x, start, start + own))
        added = tf.nn.bias_add(arrays.reshape(arrays.widen(received), [1, own]), mine)
        return arrays.reshape(added, [own])

    def _add_in_rounds(self, x: Any, lengths: Sequence[int], name: str) -> Any:
        """`_exchange_and_add` in rounds, which bound the memory for what is received."""
        sums: list[Any] = []
        rounds = exchange_rounds(lengths, _ALIGN)
        for i, spans in enumerate(rounds):
            parts = [arrays.cut(x, *span) for span in spans if span.length]
            sent = x if len(rounds) == 1 else parts[0] if len(parts) == 1 else tf.concat(parts, 0)
            with after(sums[-1:]):
                received = self._alltoall(sent, [s.length for s in spans], f"{name}/{i}")
            received.set_shape([self.size * spans[self.rank].length])
            sums.append(arrays.sum_parts(arrays.widen(received), self.size))
        return sums[0] if len(rounds) == 1 else tf.concat(sums, 0)

    def _grid_of(self, x: Any, elements: int) -> Grid | None:
        """For so many elements like those of `x`: NCCL knows the links itself."""
        return None if hvd.nccl_built() else self.eager.grid_for(elements * arrays.itemsize(x))

    def _alltoall(self, x: Any, splits: Sequence[int], name: str) -> Any:
        bits = arrays.bits(x) if x.dtype == tf.bfloat16 else x
        out, _ = hvd.alltoall(bits, splits=arrays.splits(splits), **self.options(name))
        return arrays.unbits(out) if x.dtype == tf.bfloat16 else out


def _new_mark() -> tf.Variable:
    with compat.outside_of_traces():
        return tf.Variable(-1, dtype=tf.int64, trainable=False, name="mark")
