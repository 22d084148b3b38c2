"""The settings of a ZeRO optimizer, checked once, the same for every framework."""

from __future__ import annotations

import dataclasses
from typing import Any

from zerohvd.compression.policies import (
    PLAIN,
    Plain,
    Policy,
    as_config,
    check_gradients,
    check_params,
)

STAGES = (0, 1, 2, 3)
PARTITIONS = ("auto", "flat", "parameter")
WIRE_DTYPES = ("float16", "bfloat16", "float32", "float64")
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What every rank must agree on before training starts."""

    stage: int = 2
    """0: plain data parallelism; 1: sharded optimizer state; 2: and gradients; 3: and params."""

    bucket_bytes: int = 16 * MIB
    """How many bytes of gradients are handled together: stage 2 holds full gradients of at most
    two buckets. Larger means fewer, longer collectives."""

    partition: str = "auto"
    """"flat" cuts buckets anywhere (elementwise optimizers), "parameter" keeps parameters whole
    (LAMB, Adafactor, Muon), "auto" chooses by the optimizer."""

    reduce_dtype: str | None = None
    """Gradients travel in this dtype; None: in their own."""

    master_dtype: str | None = None
    """The optimizer updates shards of this dtype; None: float32 for 16-bit parameters, else their
    own."""

    grad_clip: float | None = None
    """Clip gradients to this global 2-norm in every step; None: do not clip."""

    compression: Policy = PLAIN
    """What travels in the place of gradients."""

    param_compression: Policy = PLAIN
    """What travels in the place of parameters."""

    def __post_init__(self) -> None:
        if not isinstance(self.stage, int) or isinstance(self.stage, bool):
            raise TypeError(f"stage must be an integer of {STAGES}, got {self.stage!r}")
        if self.stage not in STAGES:
            raise ValueError(f"stage must be one of {STAGES}, got {self.stage}")
        if not isinstance(self.bucket_bytes, int) or isinstance(self.bucket_bytes, bool):
            raise TypeError(
                f"bucket_bytes must be an integer number of bytes, got {self.bucket_bytes!r}"
            )
        if self.bucket_bytes < 1:
            raise ValueError(
                f"bucket_bytes must be at least 1, got {self.bucket_bytes}; "
                f"the default is {16 * MIB}"
            )
        if self.partition not in PARTITIONS:
            raise ValueError(f"partition must be one of {PARTITIONS}, got {self.partition!r}")
        for field in ("reduce_dtype", "master_dtype"):
            value = getattr(self, field)
            if value is not None and value not in WIRE_DTYPES:
                raise ValueError(f"{field} must be None or one of {WIRE_DTYPES}, got {value!r}")
        self._check_grad_clip()
        check_gradients(self.compression, self.stage)
        check_params(self.param_compression, self.stage)
        if self.reduce_dtype is not None and self.compression not in (PLAIN, self.wire):
            raise ValueError(
                f"compression says {self.compression} and reduce_dtype says {self.reduce_dtype}: "
                "give one of them"
            )

    @property
    def wire(self) -> Policy:
        """What travels in the place of gradients, `reduce_dtype` being one way to say it."""
        return self.compression if self.reduce_dtype is None else Plain(self.reduce_dtype)

    def _check_grad_clip(self) -> None:
        clip: Any = self.grad_clip
        if clip is None:
            return
        if isinstance(clip, bool) or not isinstance(clip, (int, float)):
            raise TypeError(f"grad_clip must be a number or None, got {clip!r}")
        if not clip > 0:
            raise ValueError(
                f"grad_clip must be greater than 0, got {self.grad_clip}; "
                "pass None to leave gradients as they are"
            )

    def as_dict(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        for name in ("compression", "param_compression"):
            policy = getattr(self, name)
            found[name] = as_config(policy)
            if policy == PLAIN:
                del found[name]
        return found
