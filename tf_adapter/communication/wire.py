"""Horovod's operations as a training step needs them: named, of static shape, graph-safe.

They run eagerly or are traced into a tf.function. Python cannot count what a graph does later, so
what an operation moves is noted in a `Plan` when it is called or traced; a part of the plan that
sits in a branch (`Plan.section`) notes at run time that it ran.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from zerohvd.communication.collectives import Collectives, HorovodCollectives, SingleProcess
from zerohvd.communication.log import CommLog, CommunicationReport
from zerohvd.keras.communication import arrays

_NARROW = (tf.float16, tf.bfloat16)
# What is agreed upon (counts, flags, norms) is small and may be constant; gradients are neither.
_SMALL = 4096
# How many Wires have been made per process set; each has names of its own.
_made: dict[int, int] = {}


class _Planned(NamedTuple):
    name: str
    op: str
    dtype: str
    elements: int
    nbytes: int
    moved: int | None


class _Section:
    """Operations that run together, or not at all."""

    def __init__(self, ran: tf.Variable | None) -> None:
        self.planned: list[_Planned] = []
        self.measured: list[Callable[[CommLog], None]] = []
        self.ran = ran  # the number of the last step that ran it; None: every step does


class Plan:
    """What one step moves."""

    def __init__(self, size: int, step: tf.Variable, marks: dict[str, tf.Variable]) -> None:
        self._size = size
        self._step = step
        self._marks = marks  # outlives the plan: a graph that was traced earlier writes to them
        self._sections = {"": _Section(None)}
        self._current = ""
        self.eager = tf.executing_eagerly()  # whether the step is called, or traced

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Plan the operations of a branch; to be entered inside the branch."""
        mark = self._mark(name)
        mark.assign(self._step)
        self._sections[name] = _Section(mark)
        before, self._current = self._current, name
        try:
            yield
        finally:
            self._current = before

    def add(self, name: str, op: str, x: Any, moved: int | None = None) -> None:
        elements = arrays.numel(x)
        nbytes = elements * arrays.itemsize(x)
        planned = _Planned(name, op, arrays.dtype_name(x), elements, nbytes, moved)
        self._sections[self._current].planned.append(planned)

    def add_gathered_rows(self, name: str, x: Any, count: Any) -> None:
        """An allgather of as many rows as only the running step knows."""
        rows = self._mark(f"{name}/rows")
        rows.assign(tf.cast(count, tf.int64))
        row = arrays.itemsize(x)
        for d in x.shape[1:]:
            row *= d
        moved_each, dtype, others = row, arrays.dtype_name(x), self._size - 1

        def measure(log: CommLog) -> None:
            own = int(rows.numpy()) * moved_each
            log.add(name, "allgather", dtype, own // arrays.itemsize(x), own, moved=own * others)

        self._sections[self._current].measured.append(measure)

    def log(self) -> CommLog:
        """What the most recent step moved."""
        log = CommLog(self._size)
        for section in self._sections.values():
            if section.ran is not None and int(section.ran) != int(self._step):
                continue
            for planned in section.planned:
                log.add(*planned)
            for measure in section.measured:
                measure(log)
        return log

    def report(self) -> CommunicationReport:
        return self.log().report()

    def _mark(self, name: str) -> tf.Variable:
        if name not in self._marks:
            with tf.init_scope():
                self._marks[name] = tf.Variable(-1, dtype=tf.int64, trainable=False, name="mark")
        return self._marks[name]


def join(process_set: Any = None) -> Collectives:
    """Eager collectives of this rank in `process_set`; outside of it, a rank is on its own."""
    if hvd.is_initialized() and process_set is not None:
        if process_set.process_set_id is None:
            raise ValueError(
                f"process_set {process_set} is not registered: pass it to "
                "hvd.init(process_sets=[...]) or hvd.add_process_set() first"
            )
        if not process_set.included():
            return SingleProcess()
    return HorovodCollectives(hvd, arrays, process_set)


def _agree_on_number(ranks: Collectives, process_set: Any) -> int:
    """One that no Wire of these ranks had before, although some ranks may have started later."""
    if ranks.size == 1:
        return 0
    key = process_set.process_set_id
    number = max(ranks.allgather_object(_made.get(key, 0), name="zero/agree/number"))
    _made[key] = number + 1
    return number


class Wire:
    """The ranks of one process set, joined by horovod.tensorflow; all of them must make it."""

    def __init__(self, process_set: Any = None) -> None:
        # What the agreements at build go through.
        self.eager = join(process_set)
        self.rank, self.size = self.eager.rank, self.eager.size
        self._set = hvd.global_process_set if process_set is None else process_set
        # The same name twice at a time is an error, and two optimizers may share a step.
        number = _agree_on_number(self.eager, self._set)
        self.prefix = f"zero.{number}" if number else "zero"
        with tf.init_scope():
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
            self._kept = tf.Variable(0.0, trainable=False, name="kept")
            self._zero = tf.Variable(0.0, trainable=False, name="zero")
        self._marks: dict[str, tf.Variable] = {}
        self.plan = self.new_plan()
        self.plan.eager = False  # as in `fit`, until a step says otherwise

    def new_plan(self) -> Plan:
        self.plan = Plan(self.size, self.step, self._marks)
        return self.plan

    def keep(self, x: Any) -> None:
        """Make sure that what computes `x` runs although this rank has no use for it.

        TensorFlow drops an operation whose result nobody reads, and does not know that the other
        ranks are waiting in it.
        """
        if self.size > 1 and not tf.executing_eagerly():
            self._kept.assign(tf.cast(tf.reduce_sum(tf.reshape(x, [-1])[:1]), tf.float32))

    def live(self, x: Any) -> Any:
        """The same values, but no constant to TensorFlow.

        It evaluates operations on constants while it optimizes the graph, the collectives of this
        rank included, at a time when the other ranks are elsewhere.
        """
        if self.size == 1 or tf.executing_eagerly():
            return x
        return x + tf.cast(self._zero, x.dtype)

    def reducescatter(self, x: Any, lengths: Sequence[int], name: str) -> Any:
        """The sum over the ranks of this rank's part of `x`; 16-bit floats are added in float32.

        Args:
            x: 1-D.
            lengths: How much of it each rank keeps.
        """
        if self.size == 1:
            return _wide(x)
        kept = lengths[self.rank] * arrays.itemsize(x)
        total = sum(lengths) * arrays.itemsize(x)
        self.plan.add(name, "reducescatter", x, moved=total - kept)
        if hvd.nccl_built() and x.dtype not in _NARROW and len(set(lengths)) == 1:
            out = hvd.reducescatter(x, op=hvd.Sum, **self._how(name))
            out.set_shape([lengths[self.rank]])
            return out
        # The same bytes as a reducescatter. On CPUs that one takes fresh memory inside MPI and was
        # measured far slower; it knows neither bfloat16 nor uneven parts, and would round 16-bit
        # sums after every rank.
        return self._exchange_and_add(x, lengths, name)

    def allreduce(self, x: Any, name: str, op: str = "sum") -> Any:
        """`x` combined over the ranks; 16-bit floats are added, and come back, in float32."""
        if x.dtype in _NARROW:
            # A reducescatter and an allgather, which is what an allreduce moves.
            flat = arrays.flatten(x)
            share = -(-arrays.numel(x) // self.size)
            padded = tf.pad(flat, [[0, share * self.size - arrays.numel(x)]])
            mine = self.reducescatter(padded, [share] * self.size, f"{name}/reducescatter")
            mine = tf.cast(mine, x.dtype)
            full = self.allgather(mine, [share] * self.size, f"{name}/allgather")
            return tf.reshape(tf.cast(full[: arrays.numel(x)], tf.float32), x.shape)
        if self.size == 1:
            return x
        if arrays.numel(x) < _SMALL:
            x = self.live(x)
        self.plan.add(name, "allreduce", x)
        ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        out = hvd.allreduce(x, op=ops[op], **self._how(name))
        out.set_shape(x.shape)
        return out

    def allgather(self, x: Any, lengths: Sequence[int], name: str) -> Any:
        """The parts of all ranks, which are `lengths` long, in rank order."""
        if self.size == 1:
            return x
        out = self._gather(x, name)
        out.set_shape([sum(lengths)])
        own = lengths[self.rank] * arrays.itemsize(x)
        self.plan.add(name, "allgather", out, moved=own * (self.size - 1))
        return out

    def allgather_rows(self, x: Any, name: str) -> Any:
        """The rows of all ranks; how many each has, only the running step knows."""
        if self.size == 1:
            return x
        self.plan.add_gathered_rows(name, x, tf.shape(x)[0])
        out = self._gather(x, name)
        out.set_shape([None, *x.shape[1:]])
        return out

    def _how(self, name: str) -> dict[str, Any]:
        # Ranks find each other by name. TensorFlow numbers the scopes of branches and loops when
        # it inlines them, on each rank differently: the scope must stay out of the name, and so
        # must the slashes that make one.
        name = name.replace("/", ".")
        return {"name": name, "ignore_name_scope": True, "process_set": self._set}

    def _gather(self, x: Any, name: str) -> Any:
        bits = arrays.bits(x) if x.dtype == tf.bfloat16 else x
        out = hvd.allgather(bits, **self._how(name))
        return arrays.unbits(out) if x.dtype == tf.bfloat16 else out

    def _exchange_and_add(self, x: Any, lengths: Sequence[int], name: str) -> Any:
        """Give every rank its part of `x`, and add up what the ranks gave this one."""
        start, own = sum(lengths[: self.rank]), lengths[self.rank]
        if self.size > 2:
            return self._add_in_rounds(x, lengths, name)
        # Between two ranks one's own part stays where it is, and a + b is b + a.
        sent = x[own:] if self.rank == 0 else x[:start]
        splits = [0 if rank == self.rank else length for rank, length in enumerate(lengths)]
        received = self._alltoall(sent, splits, name)
        received.set_shape([own])
        # An addition may put its result where either operand was, and then one part would keep all
        # of `x` in memory. A bias is never overwritten.
        return tf.nn.bias_add(_wide(received)[None], _wide(x[start : start + own]))[0]

    def _add_in_rounds(self, x: Any, lengths: Sequence[int], name: str) -> Any:
        """Exchange no more at a time than makes every rank receive about as much as it sends.

        An owner of all of `x` would otherwise hold as many copies of it as there are ranks.
        """
        rounds = max(1, -(-self.size * max(lengths) // max(1, sum(lengths))))
        starts = [sum(lengths[:rank]) for rank in range(self.size)]
        sums: list[Any] = []
        for i in range(rounds):
            cuts = [_share(length, i, rounds) for length in lengths]
            parts = [x[s + a : s + b] for s, (a, b) in zip(starts, cuts, strict=True) if b > a]
            sent = x if rounds == 1 else parts[0] if len(parts) == 1 else tf.concat(parts, 0)
            wait = [] if tf.executing_eagerly() else sums[-1:]
            with tf.control_dependencies(wait):
                received = self._alltoall(sent, [b - a for a, b in cuts], f"{name}/{i}")
            received.set_shape([self.size * (cuts[self.rank][1] - cuts[self.rank][0])])
            sums.append(arrays.sum_parts(_wide(received), self.size))
        return sums[0] if rounds == 1 else tf.concat(sums, 0)

    def _alltoall(self, x: Any, splits: Sequence[int], name: str) -> Any:
        bits = arrays.bits(x) if x.dtype == tf.bfloat16 else x
        out, _ = hvd.alltoall(bits, splits=arrays.splits(splits), **self._how(name))
        return arrays.unbits(out) if x.dtype == tf.bfloat16 else out


def _wide(x: Any) -> Any:
    return tf.cast(x, tf.float32) if x.dtype in _NARROW else x


def _share(length: int, index: int, count: int) -> tuple[int, int]:
    """The range of the `index`-th of `count` parts, which start where memory is aligned."""
    part = -(-length // (16 * count)) * 16
    return min(length, index * part), min(length, (index + 1) * part)
