"""All ranks must run the same model with the same settings: checked once, before training.

Ranks that differ would otherwise wait for each other for ever, or mix up parameters of the same
size without a word. The check itself moves a fixed number of bytes whatever the ranks hold, so it
works between ranks that disagree about everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from zerohvd.communication.collectives import AsyncCollectives, Collectives, Handle
from zerohvd.errors import DisagreementError
from zerohvd.layout import Layout, ParamSpec


class Waits(Protocol):
    """Waits for handles while it serves other ranks; see `zerohvd.communication.waiting`."""

    def wait(self, handles: Sequence[Handle]) -> None: ...


@contextlib.contextmanager
def fail_together(collectives: AsyncCollectives, complaint: str, *, name: str) -> Iterator[None]:
    """Raise on all ranks if the block fails on one. Collective, at the end of the block.

    Args:
        complaint: What ranks say whose own block has not failed.
        name: Of the collective.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = any_rank(collectives, error is not None, name=name)
    if error is not None:
        raise error
    if failed:
        raise DisagreementError(complaint)


def any_rank(
    collectives: AsyncCollectives, here: bool, *, name: str, waiting: Waits | None = None
) -> bool:
    """Whether something is so on any rank. Collective.

    Args:
        here: Whether it is so on this one.
        name: Of the collective.
        waiting: Waits in the place of the handle's own wait().
    """
    seen = collectives.from_numpy(np.array([float(here)], np.float32))
    handle = collectives.allreduce_start(seen, "max", name=name)
    if waiting is not None:
        waiting.wait([handle])
    handle.wait()
    return bool(collectives.to_numpy(seen)[0])


def check_agreement(
    collectives: Collectives,
    layout: Layout,
    settings: Mapping[str, Any],
    *,
    what: str = "zero.DistributedOptimizer",
) -> None:
    """Raise the same DisagreementError on every rank unless all ranks agree.

    Args:
        collectives: Joins the ranks that must agree.
        layout: This rank's.
        settings: This rank's, as JSON can say them.
        what: Where the user stands, for the error.
    """
    laid_out = {
        "layout.size": layout.size,
        "layout.partition": layout.partition,
        "layout.bucket_bytes": layout.bucket_bytes,
        "layout.chunk_bytes": layout.chunk_bytes,
    }
    mine = json.dumps({**settings, **laid_out}, sort_keys=True, default=repr)
    digest = hashlib.sha256(f"{layout.fingerprint()}{mine}".encode()).digest()
    sent = collectives.from_numpy(np.frombuffer(digest, np.uint8).copy())
    seen = collectives.to_numpy(collectives.allgather(sent, name="zero/agree/digest"))
    digests = {row.tobytes() for row in seen.reshape(collectives.size, -1)}
    # Every rank sees the same digests, so all of them take the same branch.
    if len(digests) == 1:
        return
    own = {"settings": mine, "params": [_describe(p) for p in layout.params]}
    reference = collectives.broadcast_object(own, name="zero/agree/reference")
    difference = _first_difference(reference, own)
    found = collectives.allgather_object(difference, name="zero/agree/difference")
    raise DisagreementError(_message(what, found))


def check_same_data(collectives: Collectives, digest: str, *, hint: str) -> None:
    """Raise the same ValueError on every rank unless all ranks see the same first batch.

    Args:
        digest: Of this rank's first batch.
        hint: How the framework gives a dataset the same order on all ranks.
    """
    seen = collectives.allgather_object(digest, name="zero/dataset")
    differ = [rank for rank, found in enumerate(seen) if found != seen[0]]
    if differ:
        raise ValueError(
            f"the first batch of ranks {differ} is not that of rank 0: ranks would train on some "
            "samples twice and on others never. Give the dataset the same order on all ranks, "
            f"such as {hint}; or pass check=False if that is meant."
        )


def check_same_decision(collectives: Collectives, decided: Mapping[str, Any], *, hint: str) -> None:
    """Raise the same DisagreementError on every rank unless all ranks have decided alike.

    Args:
        decided: What was decided on this rank, in the user's words: bools, numbers or texts.
        hint: What to write instead.
    """
    seen = collectives.allgather_object(dict(decided), name="zero/decided")
    for what in decided:
        said = [f"{found[what]} on rank {rank}" for rank, found in enumerate(seen)]
        if any(found[what] != seen[0][what] for found in seen):
            raise DisagreementError(
                f"ranks have decided differently: {what} is {', '.join(said)}. {hint}"
            )


def out_of_step(collectives: Collectives, seen: Sequence[int], *, name: str) -> list[int]:
    """The ranks that have not read the same as rank 0; the same answer on all of them.

    A rank may have read further than another: what the slower one read last, the faster one has
    read too. Ranks that have read nothing are in step.

    Args:
        seen: Digests of all that this rank has read so far, taken from time to time; newest last.
        name: Of the collective.
    """
    newest = collectives.allgather_object(seen[-1] if seen else None, name=f"{name}/newest")
    if len(set(newest)) == 1:
        return []
    # Every rank sees this, so all of them come here.
    mine = set(seen)
    known = collectives.allgather_object([n is None or n in mine for n in newest], name=name)
    return [rank for rank, has in enumerate(known) if not (has[0] or known[0][rank])]


def loaded_by_first_alone(
    collectives: Collectives, loads: int, kept: Any, *, name: str
) -> tuple[int, Any] | None:
    """The `loads` and `kept` of the first rank if it has loaded something, and more often than all
    others; None if not. Collective.

    Horovod's scripts restore on rank 0 alone, then broadcast on every rank.

    Args:
        loads: How often this rank has loaded.
        kept: What it has kept for the others, as JSON can say it; false if nothing.
    """
    (first, wanted), *others = collectives.allgather_object((loads, kept), name=name)
    return (first, wanted) if wanted and all(there < first for there, _ in others) else None


def _describe(spec: ParamSpec) -> list[Any]:
    return [spec.name, list(spec.shape), spec.dtype, spec.group]


def _first_difference(reference: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str] | None:
    """[where, value at rank 0, value here], or None if there is no difference."""
    theirs: Sequence[list[Any]] = reference["params"]
    ours: Sequence[list[Any]] = mine["params"]
    for index, (a, b) in enumerate(zip(theirs, ours, strict=False)):
        if a != b:
            where = f"parameter {index}" if a[0] != b[0] else f"parameter {a[0]!r}"
            return [where, _say(a), _say(b)]
    if len(theirs) != len(ours):
        index = min(len(theirs), len(ours))
        return [
            f"parameter {index}",
            _say(theirs[index]) if index < len(theirs) else f"only {len(theirs)} parameters",
            _say(ours[index]) if index < len(ours) else f"only {len(ours)} parameters",
        ]
    a, b = json.loads(reference["settings"]), json.loads(mine["settings"])
    for key in sorted({*a, *b}):
        # As text, like the digests: 1 and 1.0, or None and no such setting, are differences too.
        said, says = (json.dumps(s[key]) if key in s else "no such setting" for s in (a, b))
        if said != says:
            return [f"setting {key!r}", said, says]
    return None


def _say(described: Sequence[Any]) -> str:
    name, shape, dtype, group = described
    return f"{name!r} {tuple(shape)} {dtype}" + (f" in group {group!r}" if group else "")


def _message(what: str, found: Sequence[Sequence[str] | None]) -> str:
    rank, first = next((r, f) for r, f in enumerate(found) if f is not None)
    where, reference, other = first
    differing = [r for r, f in enumerate(found) if f is not None]
    return (
        f"{what}: the ranks disagree, first at {where}: rank 0 has {reference}, "
        f"rank {rank} has {other} (ranks that differ from rank 0: {differing}). "
        "Build the same model, in the same order, with the same settings on every rank."
    )
