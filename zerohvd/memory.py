"""What a rank holds, in bytes, as reported during training; `zerohvd.planning` says it before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from zerohvd.config import MIB

KEYS = ("params", "grads", "optimizer", "master", "buffers", "total")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MemoryReport(Mapping[str, int]):
    """Bytes one rank holds, by purpose; a mapping with exactly the keys `KEYS`."""

    params: int = 0
    """Parameters; at stage 3 this rank's shards."""

    grads: int = 0
    """Gradients that outlive the backward pass."""

    optimizer: int = 0
    """The inner optimizer's state, such as Adam's moments."""

    master: int = 0
    """The wider copy of the parameters that the optimizer updates, where there is one."""

    buffers: int = 0
    """What is in flight: buckets on their way, and at stage 3 gathered units."""

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer + self.master + self.buffers

    def __getitem__(self, key: str) -> int:
        if key not in KEYS:
            raise KeyError(key)
        value: int = getattr(self, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(KEYS)

    def __len__(self) -> int:
        return len(KEYS)

    def __str__(self) -> str:
        values = {key: f"{self[key] / MIB:,.2f}" for key in KEYS}
        width = max(len(v) for v in values.values())
        return "\n".join(f"{key:<9}  {values[key]:>{width}} MiB" for key in KEYS)


def format_bytes(count: float) -> str:
    """A number of bytes as people read it, in units of 1024: "1.50 GiB"."""
    if abs(count) < 1024:
        return f"{count:g} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 1024 or unit == "TiB":
            break
    return f"{count:,.2f} {unit}"
