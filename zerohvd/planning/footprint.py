"""Bytes per rank: by kind, and the peak of a step."""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerohvd.config import STAGES
from zerohvd.layout import DTYPE_BYTES, Bucket
from zerohvd.memory import MemoryReport
from zerohvd.planning.timeline import Event, Timeline
from zerohvd.planning.workload import ROOT, ROWS, Section, Workload
from zerohvd.schedule import Schedule

KINDS = (
    "params", "grads", "optimizer", "master", "buffers", "gathered", "activations", "temporary",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Footprint:
    """What the fullest rank holds. Kinds are the most of each; they need not meet at one time."""

    stage: int
    size: int
    """Number of ranks."""

    params: int
    """Parameters; at stage 3 this rank's shards."""

    grads: int
    """Gradients that are whole at the end of a backward pass, or this rank's reduced shards."""

    reduced: int
    """Gradients that are left when all have been reduced."""

    optimizer: int
    """The inner optimizer's state."""

    master: int
    """The wider copy of the parameters that the optimizer updates."""

    buffers: int
    """What is in flight in a step: buckets on their way, and what arrives for them."""

    gathered: int | None
    """Stage 3: units that are whole at a time; None: not known."""

    activations: int | None
    """What the forward pass keeps for the backward pass; None: not measured."""

    temporary: int | None
    """What the passes hold besides, at their worst moment; None: not measured."""

    peak: int
    """The most at one time in a step, of all that is known."""

    when: str
    """The part of a step that has the peak: "forward and backward" or "update"."""

    @property
    def states(self) -> int:
        """What ZeRO shards: parameters, gradients, optimizer state and master."""
        return self.params + self.grads + self.optimizer + self.master

    @property
    def complete(self) -> bool:
        """Whether everything is known that counts."""
        return self.activations is not None and self.gathered is not None

    def reported(self, *, grads: bool) -> MemoryReport:
        """What memory_report will say when gradients have been reduced, before they are applied.

        Args:
            grads: The framework keeps gradients that long.
        """
        return MemoryReport(
            params=self.params,
            grads=self.reduced if grads else 0,
            optimizer=self.optimizer,
            master=self.master,
        )


def footprint(workload: Workload, stage: int, size: int) -> Footprint:
    """What the fullest of `size` ranks holds at `stage`."""
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {STAGES}, got {stage!r}")
    sections = workload.sections(stage, size)
    rank = _fullest_rank(workload, sections, stage)
    held = _held(workload, sections, stage, rank)
    gathered: int | None = _gathered(sections, size) if stage == 3 else 0
    if stage == 3 and not workload.units_known and size > 1:
        gathered = None
    rest = held.params + held.optimizer + held.master + workload.kernels
    backward = _Backward(workload, sections, stage, size, rank).run(_events(workload, sections))
    update = held.reduced + _temporary(workload, sections, rank) + _fusion(workload, stage, size)
    update += _sent_shards(workload, sections, stage, size, rank)
    passes = backward.most + (gathered or 0)
    timeline = workload.timeline
    return Footprint(
        stage=stage,
        size=size,
        **held._asdict(),
        buffers=backward.buffers,
        gathered=gathered,
        activations=None if timeline is None else timeline.saved,
        temporary=None if timeline is None else max(0, timeline.peak - timeline.saved),
        peak=rest + max(passes, update),
        when="forward and backward" if passes >= update else "update",
    )


# -- what stays ------------------------------------------------------------------------------------


class _Held(NamedTuple):
    params: int
    grads: int
    reduced: int
    optimizer: int
    master: int


def _rank_in(section: Section, rank: int) -> int:
    """At stage 0 every rank has the layout of a single one."""
    return rank if section.layout.size > 1 else 0


def _held(workload: Workload, sections: Sequence[Section], stage: int, rank: int) -> _Held:
    params, grads, reduced, master = workload.fixed, 0, 0, 0
    for section, bucket, unit in _buckets(sections):
        own = bucket.span(_rank_in(section, rank)).length
        params += (bucket.padded if unit is None else own) * DTYPE_BYTES[bucket.dtype]
        if section.trained:
            held = _grad_bytes(workload, bucket, own, stage)
            grads += held
            reduced += held - _dropped(workload, bucket, stage)
            updated = workload.updated(bucket.dtype)
            master += own * DTYPE_BYTES[updated] if updated != bucket.dtype else 0
    state = workload.optimizer.fixed + sum(
        _state_bytes(workload, section, _rank_in(section, rank))
        for section in sections
        if section.trained
    )
    return _Held(params, grads, reduced, int(state), master)


def _grad_bytes(workload: Workload, bucket: Bucket, own: int, stage: int) -> int:
    width = DTYPE_BYTES[bucket.dtype]
    wide = DTYPE_BYTES[workload.updated(bucket.dtype)] if workload.wide_grads else width
    if stage >= workload.full_grads_below:
        return own * wide
    return bucket.padded * width + (own * wide if wide != width else 0)


def _dropped(workload: Workload, bucket: Bucket, stage: int) -> int:
    """Stage 1: full gradients that nothing needs any more once there are wide sums of them. Those
    that were copied into a bucket go with it, when gradients are cleared."""
    wide = workload.wide_grads and workload.updated(bucket.dtype) != bucket.dtype
    uncopied = len(bucket.slots) == 1 and bucket.padded == bucket.numel
    return bucket.nbytes if stage == 1 and wide and uncopied else 0


def _state_bytes(workload: Workload, section: Section, rank: int) -> float:
    buckets = section.layout.buckets
    return sum(
        workload.optimizer.of_piece(
            section.params[piece.param], piece, workload.updated(buckets[piece.bucket].dtype)
        )
        for piece in section.layout.pieces(rank)
    )


def _fullest_rank(workload: Workload, sections: Sequence[Section], stage: int) -> int:
    """Flat shards are all of one length: any rank will do, but for a few elements of padding."""
    held: defaultdict[int, float] = defaultdict(float, {0: 0.0})
    for section in sections:
        if section.layout.partition == "parameter":
            for rank in {s.owner for b in section.layout.buckets for s in b.slots}:
                found = _held(workload, [section], stage, rank)
                held[rank] += found.params + found.grads + found.optimizer + found.master
    return max(held, key=lambda r: (held[r], -r))


def _gathered(sections: Sequence[Section], size: int) -> int:
    """The root, and two units: the one that computes and the next one, which is on its way."""
    if size == 1:
        return 0
    units: defaultdict[int, int] = defaultdict(int)
    for _, bucket, unit in _buckets(sections):
        if unit is not None and unit != ROWS:
            units[unit] += bucket.nbytes
    root = units.pop(ROOT, 0)
    return root + sum(heapq.nlargest(2, units.values()))


def _buckets(sections: Sequence[Section]) -> Iterator[tuple[Section, Bucket, int | None]]:
    for section in sections:
        for bucket, unit in zip(section.layout.buckets, section.units, strict=True):
            yield section, bucket, unit


# -- a step ----------------------------------------------------------------------------------------


def _temporary(workload: Workload, sections: Sequence[Section], rank: int) -> int:
    """What the optimizer allocates for the largest piece that it updates."""
    largest = max(
        (
            piece.param_span.length
            for section in sections
            if section.trained
            for piece in section.layout.pieces(_rank_in(section, rank))
        ),
        default=0,
    )
    return int(largest * workload.optimizer.temporary)


def _fusion(workload: Workload, stage: int, size: int) -> int:
    """Horovod fuses allreduces and allgathers; two ranks that shard have neither."""
    return workload.fusion_bytes if size > 2 or (size == 2 and stage == 0) else 0


def _sent_shards(
    workload: Workload, sections: Sequence[Section], stage: int, size: int, rank: int
) -> int:
    """Copies of the updated shards, from which an allgather sends."""
    if not workload.copies_received or size <= 2 or stage == 0:
        return 0
    return sum(
        bucket.span(_rank_in(section, rank)).length * DTYPE_BYTES[bucket.dtype]
        for section, bucket, unit in _buckets(sections)
        if unit is None and section.trained
    )


def _events(workload: Workload, sections: Sequence[Section]) -> Sequence[Event]:
    """What was measured, or gradients alone, the last parameter's first."""
    timeline: Timeline | None = workload.timeline
    if timeline is not None:
        return timeline.events
    trained = sorted(p for s in sections if s.trained for p in s.params)
    return [Event(0), *(Event(0, p) for p in reversed(trained))]


class _Backward:
    """Gradients on their way, bucket by bucket, as the adapters send them.

    Attributes:
        most: The most bytes of activations, gradients and buffers at one time.
        buffers: The most bytes in flight at one time.
    """

    def __init__(
        self, workload: Workload, sections: Sequence[Section], stage: int, size: int, rank: int
    ) -> None:
        self._workload, self._stage, self._size, self._rank = workload, stage, size, rank
        self._sections = [s for s in sections if s.trained]
        self._home = {
            param: (section, local)
            for section in self._sections
            for local, param in enumerate(section.params)
        }
        self._schedules = {id(s): Schedule(s.layout) for s in self._sections}
        self._flats: dict[tuple[int, int], int] = {}  # full gradients by section and bucket
        self._full = 0  # their sum
        self._flying: deque[tuple[tuple[int, int], int]] = deque(maxlen=workload.in_flight)
        # Two ranks at stage 2 keep what they receive as the shard; others reuse their buffers.
        self._frees = stage >= workload.full_grads_below  # full gradients, once they have gone
        self._grows = self._frees and workload.copies_received and stage == 2 and size == 2
        self._kept = self._shards_kept()
        self._fusion = _fusion(workload, stage, size)
        self.most = self.buffers = 0

    def run(self, events: Sequence[Event]) -> _Backward:
        live = 0
        for event in events:
            live = event.live
            arriving = 0 if event.param < 0 else self._arrive(event.param)
            self._note(live, arriving)
        for section in self._sections:
            for b in self._schedules[id(section)].flush():
                self._send(section, b)
                self._note(0, 0)
        return self

    def _note(self, live: int, arriving: int) -> None:
        sizes = [nbytes for _, nbytes in self._flying]
        # MPI reduces one bucket at a time; buckets that are exchanged all have their memory.
        received = self._fusion + (sum(sizes) if self._stage else max(sizes, default=0))
        self.most = max(self.most, live + arriving + self._full + received + self._kept)
        # Full gradients that stay are gradients; others are only passing through.
        passing = self._full if self._frees else 0
        self.buffers = max(self.buffers, passing + received)

    def _arrive(self, param: int) -> int:
        """Put a gradient into its buckets; returns the bytes of what is copied there."""
        section, local = self._home[param]
        layout, copied = section.layout, 0
        for b, slot in layout.slots_of[local]:
            bucket = layout.buckets[b]
            self._hold((id(section), b), bucket.nbytes)
            if bucket.padded != slot.length:
                copied += slot.length * DTYPE_BYTES[bucket.dtype]
        for b in self._schedules[id(section)].ready(local):
            self._send(section, b)
        return copied

    def _send(self, section: Section, b: int) -> None:
        bucket = section.layout.buckets[b]
        own = bucket.span(_rank_in(section, self._rank)).length * DTYPE_BYTES[bucket.dtype]
        if len(self._flying) == self._flying.maxlen:
            self._land()
        self._hold((id(section), b), bucket.nbytes)
        if self._grows:
            self._kept += own
        self._flying.append(((id(section), b), self._received(bucket, own)))

    def _land(self) -> None:
        key, _ = self._flying.popleft()
        if self._frees:
            self._full -= self._flats.pop(key, 0)

    def _hold(self, key: tuple[int, int], nbytes: int) -> None:
        if key not in self._flats:
            self._flats[key] = nbytes
            self._full += nbytes

    def _received(self, bucket: Bucket, own: int) -> int:
        if self._size == 1 or not self._workload.copies_received:
            return 0
        if self._stage == 0:
            return bucket.nbytes // 2  # what MPI's allreduce takes for what it receives
        if self._size == 2:
            return 0 if self._frees else own
        return own * self._size

    def _shards_kept(self) -> int:
        """Memory of reduced gradients that stays from step to step."""
        if self._grows:
            return 0
        kept = 0
        for section, bucket, _ in _buckets(self._sections):
            own = bucket.span(_rank_in(section, self._rank)).length
            whole = 0 if self._frees else bucket.nbytes
            kept += _grad_bytes(self._workload, bucket, own, self._stage) - whole
        return kept
