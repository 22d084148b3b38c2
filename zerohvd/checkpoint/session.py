"""The story of a save and of a load, the same for every framework.

A save: the ranks meet; each looks at what it holds and tells the others what may differ between
them; each writes its part; when all have, the checkpoint is published. A load: the ranks meet; each
matches the manifest with its model, reads the ranges it needs into memory that nothing uses yet,
and when all have succeeded, everything is applied. An error on one rank is raised on all of them,
and neither a half-written checkpoint nor a half-loaded model is left.

An adapter implements `Training`, and hands out a `Snapshot` or a `Target`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zerohvd import limits
from zerohvd.checkpoint import writer
from zerohvd.checkpoint.entries import Content, Entry, Want, share_out, whole
from zerohvd.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    ReplacedCheckpointError,
    reading,
    together,
)
from zerohvd.checkpoint.format import MANIFEST
from zerohvd.checkpoint.manifest import Manifest, TensorInfo, names_in, read_manifest
from zerohvd.checkpoint.matching import (
    OWN,
    SHARED,
    LoadPlan,
    Matching,
    Names,
    Staging,
    own_name,
)
from zerohvd.checkpoint.reader import Reader, Source, open_safetensors
from zerohvd.checkpoint.values.document import brief
from zerohvd.checkpoint.values.tree import Array, encode
from zerohvd.communication.collectives import Collectives
from zerohvd.communication.rendezvous import Call


class Training(Protocol):
    """A model and its optimizer on this rank."""

    @property
    def framework(self) -> str:
        """As in `Manifest`."""

    def meet(self, call: Call) -> Collectives:
        """Bring all ranks to the same call with nothing under way between them."""

    def snapshot(self) -> Snapshot:
        """For a save, after `meet`."""

    def target(self) -> Target:
        """For a load, after `meet`."""

    def to_array(self, value: Any) -> Array | None:
        """For `tree.encode`: an array of the framework; None for anything else."""

    def from_array(self, info: TensorInfo, data: Any) -> Any:
        """For `tree.decode`: the reverse, from bytes."""


class Snapshot(Protocol):
    """What this rank holds. Entries give their bytes when they are written."""

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the same pieces."""

    def pieces(self) -> Iterable[Entry]:
        """This rank's ranges of parameters, masters and optimizer state."""

    def copies(self) -> Iterable[Entry]:
        """Whole tensors that every rank holds alike."""

    def variants(self) -> Iterable[Entry]:
        """Whole tensors that every rank holds, maybe with other values: statistics, seeds."""

    def own(self, rank: int) -> Iterable[Entry]:
        """Tensors that only this rank has, by names that say so."""

    def values(self, rank: int) -> dict[str, dict[str, Any]]:
        """As in `Content`."""

    def config(self) -> dict[str, Any]:
        """Settings of the optimizer, for people to read."""

    def given(self) -> dict[str, Any]:
        """Objects of the user that go into the state, and may hold what cannot be stored."""

    def state(self) -> dict[str, Any]:
        """What else all ranks have in common and is no tensor."""

    def generators(self) -> dict[str, Any]:
        """States of random number generators."""

    def counted_steps(self) -> int | None:
        """Of the optimizer."""


class Target(Protocol):
    """What a load fills."""

    @property
    def staging(self) -> Staging: ...

    def openers(self) -> Mapping[str, Callable[[Path], Source]]:
        """Suffix of a plain file of weights -> what opens it, beside .safetensors."""

    def names(self, stored: Stored) -> Names:
        """Of the model, related to those in the checkpoint."""

    def plan(self, plan: LoadPlan, stored: Stored, *, strict: bool) -> None:
        """Add everything to be read; raise if it does not fit. Changes nothing in the model."""

    def apply(self, plan: LoadPlan, stored: Stored) -> None:
        """Let everything that was read take effect; all ranks call it."""

    def changes(self, stored: Stored) -> Iterable[Change]:
        """What else takes over something that was stored, and may refuse it: schedulers, ..."""

    def prepare_generators(self, stored: Mapping[str, Any]) -> Callable[[], None]:
        """Check states of random number generators; returns what sets them, and cannot fail."""


class Change(NamedTuple):
    """Something that a load does to an object whose class is not ours.

    Args:
        what: For errors.
        put: May raise; then nothing is loaded.
        undo: As if `put` had not been called, whether it raised or not.
    """

    what: str
    put: Callable[[], Any]
    undo: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a checkpoint says beside its tensors.

    Attributes:
        manifest: Of a plain file, an empty one.
        complete: It is a checkpoint, not a plain file of weights.
        state: What all ranks had in common.
        own: What this rank had for itself; empty where the number of ranks is another one.
    """

    manifest: Manifest
    complete: bool
    state: Mapping[str, Any]
    own: Mapping[str, Any]


# -- saving ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Notes:
    """What a save stores beside the training.

    Args:
        extra: The user's.
        step: For the manifest.
        metric: How good the model is.
    """

    extra: Any = None
    step: int | None = None
    metric: float | None = None


@limits.during(Call.SAVE.said)
def save(path: Path, training: Training, notes: Notes) -> None:
    """Store a checkpoint at `path`; all ranks must call it."""
    ranks, plan = plan_save(training, notes)
    writer.save(path, ranks, plan)


@limits.during(Call.SAVE.said)
def plan_save(
    training: Training, notes: Notes, call: Call = Call.SAVE
) -> tuple[Collectives, writer.SavePlan]:
    """Bring the ranks together; returns them, and how this one comes to its part."""
    ranks = training.meet(call)
    taken: list[Snapshot] = []

    def look() -> dict[str, int]:
        taken.append(training.snapshot())
        # What cannot be stored shows before anything is written.
        given = {"extra": notes.extra, **taken[0].given()}
        encode(given, "state", {}, training.to_array)
        return {e.name: zlib.crc32(e.read()) for e in taken[0].variants()}

    def make(sums: list[dict[str, int]]) -> Content:
        return _content(training, taken[0], notes, sums, ranks.rank)

    return ranks, writer.SavePlan(look, make)


def _content(
    training: Training, held: Snapshot, notes: Notes, sums: list[dict[str, int]], rank: int
) -> Content:
    """What this rank stores.

    Args:
        sums: Of every rank, the checksums of its variants.
    """
    _check_same_names(sums)
    made = Content(training.framework, values=held.values(rank), config=held.config())
    made.step = _training_step(notes, held)
    pieces = list(held.pieces())
    made.entries += share_out(pieces, rank, len(sums)) if held.replicated else pieces
    made.entries += _whole_tensors(held, sums, rank)
    made.entries += held.own(rank)
    beside: dict[str, Array] = {}
    own: dict[str, Array] = {}
    state = {**held.state(), **held.given(), "extra": notes.extra, "metric": notes.metric}
    made.state = encode(state, "state", beside, training.to_array)
    made.rank_state = encode({"rng": held.generators()}, f"rank{rank}", own, training.to_array)
    if rank == 0:
        made.entries += [whole(SHARED, name, array) for name, array in beside.items()]
    made.entries += [whole(OWN, name, array) for name, array in own.items()]
    return made


def _check_same_names(sums: list[dict[str, int]]) -> None:
    for rank, names in enumerate(sums):
        differing = sorted(set(names) ^ set(sums[0]))
        if differing:
            raise ValueError(
                f"ranks 0 and {rank} have other variables in the model; {differing[0]!r} is on one "
                "of them only. Make the same models, in the same order, on every rank: Keras "
                "numbers the names of layers"
            )


def _whole_tensors(held: Snapshot, sums: list[dict[str, int]], rank: int) -> list[Entry]:
    """Each tensor that all ranks have alike from one of them, and every version of the others."""
    alike, mine = [*held.copies()], []
    for entry in held.variants():
        if all(s[entry.name] == sums[0][entry.name] for s in sums):
            alike.append(entry)
        elif rank == 0:
            mine.append(entry)
        elif sums[rank][entry.name] != sums[0][entry.name]:
            name = own_name(entry.name, rank)
            mine.append(dataclasses.replace(entry, kind=OWN, name=name))
    return share_out(alike, rank, len(sums), uncut=True) + mine


def _training_step(notes: Notes, held: Snapshot) -> int | None:
    """What a manifest calls the step: as given, as in `extra`, or as the optimizer counted."""
    if notes.step is not None:
        return int(notes.step)
    if isinstance(notes.extra, Mapping) and isinstance(notes.extra.get("step"), int):
        return int(notes.extra["step"])
    return held.counted_steps()


# -- loading ---------------------------------------------------------------------------------------


@limits.during(Call.LOAD.said)
def load(path: Path, training: Training, *, strict: bool = True, restore_rng: bool = True) -> Any:
    """Load the checkpoint, or plain file, at `path`; all ranks must call it.

    Returns:
        What `extra` was when it was saved.
    """
    ranks = training.meet(Call.LOAD)
    place = Place(path, lambda target: _open(path, target.openers()))
    for left in reversed(range(_ATTEMPTS)):
        try:
            ready = _read(place, training, ranks, strict=strict, restore_rng=restore_rng)
            break
        except ReplacedCheckpointError:  # on all ranks
            if not left:
                raise
    return _use(place, ready, ranks)


def load_from(place: Place, training: Training, ranks: Collectives) -> Any:
    """As `load`, of what is no checkpoint on disk, after the ranks have met."""
    return _use(place, _read(place, training, ranks, strict=True, restore_rng=True), ranks)


def _use(place: Place, ready: _Ready, ranks: Collectives) -> Any:
    """Let everything take effect that was read; returns what `extra` was."""
    _take(place.path, ready, ranks)
    ready.target.apply(ready.plan, ready.stored)
    ready.set_generators()
    return ready.stored.state.get("extra")


class Place(NamedTuple):
    """Where a load finds its tensors.

    Args:
        path: For errors.
        open: What is there, and whether it is a checkpoint (or plain weights).
        fetch: Called on all ranks when all know what they want to read: may move files to them.
    """

    path: Path
    open: Callable[[Target], tuple[Source, bool]]
    fetch: Callable[[Source, Sequence[Want]], None] | None = None


# A job that saves under the name that another one loads does so once in a while.
_ATTEMPTS = 3


class _Ready(NamedTuple):
    """All that a load is going to do on this rank, read and checked."""

    target: Target
    plan: LoadPlan
    stored: Stored
    set_generators: Callable[[], None]


def _read(
    place: Place, training: Training, ranks: Collectives, *, strict: bool, restore_rng: bool
) -> _Ready:
    """Read and check everything; nothing has been changed when it raises, on all ranks."""
    path = place.path
    opened: list[Source] = []
    ready: list[_Ready] = []

    def prepare() -> None:
        with reading(path), _unless_replaced(path, opened):
            target = training.target()
            source, complete = place.open(target)
            opened.append(source)
            ready.append(_plan(source, complete, target, training, ranks, strict=strict))

    def read() -> str:
        if place.fetch is None:
            prepare()
        with reading(path), _unless_replaced(path, opened):
            opened[0].read(ready[0].plan.wants, ranks.rank, ranks.size)
            if restore_rng and "rng" in ready[0].stored.own:
                act = ready[0].target.prepare_generators(ready[0].stored.own["rng"])
                ready[0] = ready[0]._replace(set_generators=act)
            return opened[0].manifest.id

    if place.fetch is not None:
        together(ranks, "plan", prepare)
        place.fetch(opened[0], ready[0].plan.wants)
    _, ids = together(ranks, "read", read)
    # Every rank sees the same ids, so all of them take the same branch.
    if len(set(ids)) > 1:
        raise ReplacedCheckpointError(
            f"the ranks found different checkpoints at {path}: it must lie on a file system that "
            "all ranks share, and not be replaced while it is being loaded"
        )
    return ready[0]


def _plan(
    source: Source,
    complete: bool,
    target: Target,
    training: Training,
    ranks: Collectives,
    *,
    strict: bool,
) -> _Ready:
    stored = _stored(source, complete, training, ranks)
    plan = LoadPlan(_matching(source, stored, target, ranks), target.staging)
    if strict:
        plan.matching.check_names()
    target.plan(plan, stored, strict=strict)
    return _Ready(target, plan, stored, lambda: None)


@contextlib.contextmanager
def _unless_replaced(path: Path, opened: Sequence[Source]) -> Iterator[None]:
    """Say so if what goes wrong is that another save has replaced the checkpoint meanwhile."""
    try:
        yield
    except CheckpointError as error:
        for source in opened:
            _refuse_replaced(path, source.manifest, error)
        raise


def _refuse_replaced(path: Path, manifest: Manifest, error: CheckpointError) -> None:
    """Say so if what went wrong is that another save has replaced the checkpoint meanwhile."""
    try:
        now = read_manifest(path)[1].id if manifest.id else ""
    except CheckpointError:
        return
    if now != manifest.id:
        raise ReplacedCheckpointError(
            f"{path} was replaced by another save while it was being loaded: load it again"
        ) from error


def _take(path: Path, ready: _Ready, ranks: Collectives) -> None:
    """Let objects that may refuse what was stored take it; if one does, none has, on any rank."""
    done: list[Change] = []

    def act() -> None:
        with reading(path):
            changes = list(ready.target.changes(ready.stored))
        for change in changes:
            done.append(change)
            with reading(path, change.what):
                change.put()

    try:
        together(ranks, "take", act)
    except BaseException:
        for change in reversed(done):
            change.undo()
        raise


def _open(
    path: Path, openers: Mapping[str, Callable[[Path], Source]]
) -> tuple[Source, bool]:
    """What is at `path`, and whether it is a checkpoint (or plain weights)."""
    if path.is_dir() or not path.exists():
        return Reader.open(path), True
    openers = {".safetensors": open_safetensors, **openers}
    for suffix, opener in openers.items():
        if path.name.endswith(suffix):
            return opener(path), False
    raise ValueError(
        f"{path} is neither a checkpoint's folder nor a file of weights: {', '.join(openers)}"
    )


def _stored(source: Source, complete: bool, training: Training, ranks: Collectives) -> Stored:
    manifest = source.manifest
    if not complete:
        return Stored(manifest, False, {}, {})
    assert isinstance(source, Reader)
    if manifest.framework != training.framework:
        raise ValueError(
            f"the checkpoint was saved by {manifest.framework}, not by {training.framework}. "
            "`zerohvd checkpoint consolidate` makes plain weights of it"
        )
    own: Any = {}
    if len(manifest.rank_states) == ranks.size:
        own = source.decode(manifest.rank_states[ranks.rank], OWN, training.from_array)
    state = source.decode(manifest.state, SHARED, training.from_array)
    for what, value in (("state", state), ("rank_states", own)):
        if not isinstance(value, Mapping):
            raise CorruptCheckpointError(
                f"{source.folder / MANIFEST}: {what} should be an object, not {brief(value)}"
            )
    return Stored(manifest, True, state, own)


def _matching(source: Source, stored: Stored, target: Target, ranks: Collectives) -> Matching:
    return Matching(
        source.tensors,
        target.names(stored),
        aliases=names_in(stored.state, "aliases"),
        rank=ranks.rank,
        size=ranks.size,
        saved_size=stored.manifest.size if stored.complete else 0,
    )
