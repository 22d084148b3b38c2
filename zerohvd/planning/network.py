"""What a collective costs: a line through measured points, and what Horovod adds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OPS = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")
# Of Horovod: how often its thread looks for collectives that all ranks have asked for.
CYCLE_SECONDS = 1e-3
# Horovod keeps answers in a cache for all others: a reducescatter is negotiated in every step.
UNCACHED = ("reducescatter",)


@dataclasses.dataclass(frozen=True)
class Link:
    """Cost of one collective: `(N-1) * alpha + (N-1)/N * M / beta` for N ranks and M bytes."""

    alpha: float
    """Seconds per rank that a message passes."""

    beta: float
    """Bytes per second of one rank."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf or not 0 < self.beta < math.inf:
            raise ValueError(
                "a link has a latency of 0 or more seconds and a bandwidth greater than 0, got "
                f"alpha={self.alpha!r} and beta={self.beta!r}"
            )

    def seconds(self, nbytes: float, size: int) -> float:
        return (size - 1) * self.alpha + (size - 1) / size * nbytes / self.beta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What ranks are connected by.

    Args:
        links: Per operation; "" for those without one of their own.
        cycle: Seconds between two looks of Horovod's thread.
        name: Where the numbers come from.
    """

    links: Mapping[str, Link]
    cycle: float = CYCLE_SECONDS
    name: str = "given"

    def link(self, op: str) -> Link:
        found = self.links.get(op) or self.links.get("")
        if found is None:
            raise ValueError(
                f"the network says nothing of {op}; it has {', '.join(sorted(self.links))}"
            )
        return found

    def seconds(self, op: str, nbytes: float, size: int) -> float:
        """One collective of `nbytes`, the size of the whole buffer, without waiting for Horovod."""
        if size == 1:
            return 0.0
        # A ring's allreduce is a reducescatter and an allgather.
        times = 2 if op == "allreduce" else 1
        return times * self.link(op).seconds(nbytes, size) + self.negotiation(op, size)

    def negotiation(self, op: str, size: int) -> float:
        """Ranks tell the first one what they have, and hear what to do: four trees of messages."""
        if op not in UNCACHED:
            return 0.0
        return 4 * math.ceil(math.log2(size)) * self.link(op).alpha

    def as_dict(self) -> dict[str, Any]:
        links = {op: dataclasses.asdict(link) for op, link in self.links.items()}
        return {"name": self.name, "cycle": self.cycle, "links": links}


def fit(points: Sequence[tuple[float, int, float]]) -> Link:
    """The link of (bytes, ranks, seconds) points: least squares of relative errors.

    Relative, because the seconds of large messages would drown those of small ones.
    """
    if not points:
        raise ValueError("there is no measurement to fit a link to")
    # seconds = alpha * a + inverse * b, each row divided by its seconds.
    rows = [((n - 1) / s, (n - 1) / n * m / s) for m, n, s in points]
    aa, bb = sum(a * a for a, _ in rows), sum(b * b for _, b in rows)
    ab, a1, b1 = sum(a * b for a, b in rows), sum(a for a, _ in rows), sum(b for _, b in rows)
    det = aa * bb - ab * ab
    alpha, inverse = 0.0, b1 / bb
    if det > 1e-12 * aa * bb:
        alpha, inverse = (a1 * bb - b1 * ab) / det, (b1 * aa - a1 * ab) / det
    if inverse <= 0:  # noise: no size costs more than another
        alpha, inverse = a1 / aa, 1e-15
    if alpha < 0:
        alpha, inverse = 0.0, b1 / bb
    return Link(alpha, 1 / inverse)


def of_bandwidth(gbits: float, latency: float = 20e-6) -> Network:
    """All operations alike: `gbits` Gbit/s per rank."""
    if not 0 < gbits < math.inf:
        raise ValueError(f"a bandwidth must be greater than 0 Gbit/s, got {gbits!r}")
    return Network(links={"": Link(latency, gbits * 1e9 / 8)}, name=f"{gbits:g} Gbit/s per rank")


def default_file(environ: Mapping[str, str]) -> Path:
    """Where measurements are stored, and looked for, unless a file is named."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "zerohvd" / "network.json"


def load(path: str | Path) -> Network:
    """Read what `zerohvd doctor --run N --bandwidth` has stored."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        links = {op: Link(**link) for op, link in document["links"].items()}
        return Network(links=links, cycle=float(document["cycle"]), name=str(document["name"]))
    except OSError as error:
        raise ValueError(f"the network file {str(path)!r} cannot be read: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} is no network file ({type(error).__name__}: {error}): make one with "
            "`zerohvd doctor --run 2 --bandwidth`"
        ) from error
