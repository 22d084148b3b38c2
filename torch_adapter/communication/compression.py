"""What gradients look like on the wire."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from zerohvd.config import ZeroConfig
from zerohvd.torch.communication import arrays


class _BF16Compressor:
    """Marker in the manner of Horovod's compressors: gradients travel as bfloat16."""


class Compression:
    """Horovod's choices, and bfloat16: half the bytes with the range of float32.

    From stage 1 on, sums are taken in float32 whatever travels; stage 0 adds fp16 as Horovod does.
    """

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16
    bf16 = _BF16Compressor


_WIRES: dict[Any, torch.dtype | None] = {
    Compression.none: None,
    Compression.fp16: torch.float16,
    Compression.bf16: torch.bfloat16,
}


def wire_dtype(compression: Any, config: ZeroConfig) -> torch.dtype | None:
    """The dtype gradients travel in; None: their own."""
    if compression not in _WIRES:
        raise ValueError(
            f"compression must be zero.Compression.none, .fp16 or .bf16 (Horovod's none and fp16 "
            f"are the same objects), got {compression!r}"
        )
    wire = _WIRES[compression]
    if config.reduce_dtype is None:
        return wire
    asked = arrays.dtype_of(config.reduce_dtype)
    if wire is not None and wire != asked:
        raise ValueError(
            f"compression says {arrays.dtype_name(wire)} and reduce_dtype says "
            f"{config.reduce_dtype}: give one of them"
        )
    return asked
