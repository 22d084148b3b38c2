"""Several stages and numbers of ranks side by side, and which of them to choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerohvd.config import STAGES
from zerohvd.errors import ZeroError
from zerohvd.planning import traffic
from zerohvd.planning.footprint import Footprint, footprint
from zerohvd.planning.network import Network, load
from zerohvd.planning.sizes import is_binary, parse_bytes, show_bytes, show_seconds
from zerohvd.planning.traffic import StepTime
from zerohvd.planning.workload import Workload


class NothingFitsError(ZeroError):
    """No stage fits into the memory that was given."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One stage at one number of ranks."""

    memory: Footprint
    moved: int
    """Bytes that a rank sends in a step."""

    calls: int
    """Collectives of a step."""

    time: StepTime | None
    """Seconds of a step; None: no network was given."""

    fits: bool | None
    """Whether the peak is below the limit; None: no limit was given."""

    @property
    def stage(self) -> int:
        return self.memory.stage

    @property
    def size(self) -> int:
        return self.memory.size

    def as_dict(self) -> dict[str, Any]:
        held = dataclasses.asdict(self.memory)
        return {
            "stage": held.pop("stage"),
            "ranks": held.pop("size"),
            "states": self.memory.states,
            **held,
            "moved": self.moved,
            "calls": self.calls,
            "seconds": None if self.time is None else self.time._asdict(),
            "fits": self.fits,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What every stage needs, at every number of ranks that was asked for."""

    workload: Workload
    rows: tuple[Row, ...]
    limit: int | None
    """Bytes that a rank may hold; None: not given."""

    network: Network | None
    compute: float | None
    """Seconds of a step without communication; None: not given."""

    binary: bool
    """Sizes are shown in units of 1024."""

    @property
    def fits(self) -> bool | None:
        """Whether any stage fits at any number of ranks; None: no limit was given."""
        return None if self.limit is None else any(row.fits for row in self.rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(row.size for row in self.rows))

    def row(self, stage: int, size: int | None = None) -> Row:
        """One row; `size` may be left out where there is only one number of ranks."""
        found = [r for r in self.rows if r.stage == stage and size in (None, r.size)]
        if len(found) != 1:
            ranks = ", ".join(map(str, self.sizes))
            raise ValueError(f"no single row has stage={stage} and size={size}; ranks: {ranks}")
        return found[0]

    def chosen(self, size: int | None = None) -> Row | None:
        """The lowest stage that fits; without a limit, the lowest that holds least below stage 3,
        which moves more. None: nothing fits."""
        rows = [r for r in self.rows if size in (None, r.size)]
        size = min(r.size for r in rows) if size is None else size
        if self.limit is not None:
            fitting = [r for r in rows if r.fits]
            return min(fitting, key=lambda r: (r.size, r.stage), default=None)
        rows = [r for r in rows if r.size == size and r.stage < 3] or rows
        return min(rows, key=lambda r: (r.memory.peak, r.stage))

    @property
    def stage(self) -> int:
        """The stage that is recommended.

        Raises:
            NothingFitsError: None of them fits.
        """
        row = self.chosen()
        if row is None:
            raise NothingFitsError(self.recommendation)
        return row.stage

    @property
    def recommendation(self) -> str:
        """One sentence: what to choose, and why."""
        row = self.chosen()
        if row is None:
            return self._nothing_fits()
        why = f"stage {row.stage} on {_ranks(row.size)}: {self.show(row.memory.peak)} per rank"
        if self.limit is None:
            why += ", the least that moves no more than plain data parallelism" * (row.stage < 3)
        else:
            why += f" of {self.show(self.limit)}, the lowest stage that fits"
            below = [r for r in self.rows if r.size == row.size and r.stage < row.stage]
            if below:
                why += f" (stage {below[-1].stage} needs {self.show(below[-1].memory.peak)})"
        return f"{why}{self._unknown(row)}."

    def _nothing_fits(self) -> str:
        least = min(self.rows, key=lambda r: r.memory.peak)
        return (
            f"nothing fits into {self.show(self.limit or 0)} per rank: the least is "
            f"{self.show(least.memory.peak)}, at stage {least.stage} on {_ranks(least.size)}"
            f"{self._unknown(least)}; use more ranks, a smaller batch or a narrower dtype."
        )

    def _unknown(self, row: Row) -> str:
        missing = []
        if row.memory.activations is None:
            missing.append("activations")
        if row.memory.gathered is None:
            missing.append("the units that stage 3 gathers")
        return f"; not counted: {' and '.join(missing)}" if missing else ""

    def show(self, count: float) -> str:
        """Bytes in this plan's units."""
        return show_bytes(count, binary=self.binary)

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers should know."""
        found = list(self.workload.notes)
        timeline = self.workload.timeline
        if timeline is not None:
            found.append(f"activations: {timeline.how}")
        else:
            found.append(f"activations were not measured: {self.workload.unmeasured}")
        if any(row.memory.gathered is None for row in self.rows):
            found.append(
                "what stage 3 gathers depends on the model's units: give a model, or --layers"
            )
        if self.network is not None:
            what = "without computation" if self.compute is None else (
                f"computation: {show_seconds(self.compute)}"
            )
            found.append(f"network: {self.network.name}; {what}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        row = self.chosen()
        return {
            "model": self.workload.name,
            "framework": self.workload.framework or None,
            "optimizer": self.workload.optimizer.name,
            "memory": self.limit,
            "network": None if self.network is None else self.network.as_dict(),
            "compute": self.compute,
            "rows": [r.as_dict() for r in self.rows],
            "chosen": None if row is None else {"stage": row.stage, "ranks": row.size},
            "fits": self.fits,
            "recommendation": self.recommendation,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        lines = [f"{self.workload.name}, {self.workload.optimizer.name}, per rank:"]
        for row in self.rows:
            fits = {None: "", True: "  fits", False: "  does not fit"}[row.fits]
            lines.append(
                f"  {_ranks(row.size)}, stage {row.stage}: peak {self.show(row.memory.peak)}, "
                f"of it states {self.show(row.memory.states)}; moves {self.show(row.moved)}{fits}"
            )
        return "\n".join([*lines, self.recommendation])


def make_plan(
    workload: Workload,
    ranks: int | Sequence[int],
    *,
    memory: str | float | None = None,
    stages: Sequence[int] = STAGES,
    network: Network | str | Path | None = None,
    compute: float | None = None,
) -> Plan:
    """Compare stages and numbers of ranks.

    Args:
        ranks: Numbers of ranks, or one.
        memory: What a rank may hold: "16GiB", "40GB" or bytes.
        network: For the time of a step; or a file that holds one.
        compute: Seconds of a step without communication.
    """
    limit = None if memory is None else parse_bytes(memory)
    if compute is not None and not compute >= 0:
        raise ValueError(f"compute must be a number of seconds, 0 or more, got {compute!r}")
    if isinstance(network, (str, Path)):
        network = load(network)
    rows = []
    for size in [ranks] if isinstance(ranks, int) else ranks:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"ranks must be positive integers, got {size!r}")
        for stage in stages:
            held = footprint(workload, stage, size)
            found = traffic.collectives(workload, stage, size)
            time = None
            if network is not None:
                time = traffic.step_time(found, size, network, compute or 0.0)
            fits = None if limit is None else held.peak <= limit
            rows.append(Row(held, traffic.moved(found, size), len(found), time, fits))
    return Plan(
        workload=workload,
        rows=tuple(rows),
        limit=limit,
        network=network,
        compute=compute,
        binary=is_binary(memory),
    )


def _ranks(size: int) -> str:
    return f"{size} rank{'s' if size != 1 else ''}"
