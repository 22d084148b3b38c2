"""The policies a user chooses from, and where each of them may be used."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Plain:
    """Numbers travel as numbers: in their own dtype, or in a 16-bit one."""

    dtype: str | None = None
    """"float16", "bfloat16", or None: their own."""

    def __str__(self) -> str:
        named = {None: "none", "float16": "fp16", "bfloat16": "bf16"}
        return str(named.get(self.dtype, self.dtype))


PLAIN = Plain()


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of numbers travel as integers of a few bits and one scale each."""

    bits: int
    """8 or 4."""

    error_feedback: bool = False
    """Gradients: what rounding takes away is added to the next step's gradient."""

    def __str__(self) -> str:
        return f"int{self.bits}"


@dataclasses.dataclass(frozen=True)
class TopK:
    """The largest gradients travel, with their places; the others wait and add up."""

    ratio: float
    """Which share of them, such as 0.01."""

    momentum: float = 0.0
    """Momentum that gradients gather while they wait ("momentum correction"). It takes the place of
    the optimizer's own."""

    clip: float | None = None
    """Clip each rank's gradient, bucket by bucket, to this 2-norm before it is added to what
    waits."""

    warmup_steps: int = 0
    """The share goes down from a quarter to `ratio` in the course of so many steps."""

    def __post_init__(self) -> None:
        _check_ratio("topk", self.ratio)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be at least 0 and less than 1, got {self.momentum!r}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be greater than 0, or None, got {self.clip!r}")
        steps: Any = self.warmup_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"warmup_steps must be an integer of at least 0, got {steps!r}")

    def ratio_at(self, step: int) -> float:
        """Which share travels in a step: in the warm-up, four parts of equal length."""
        first = 0.25
        if step >= self.warmup_steps or self.ratio >= first:
            return self.ratio
        part = 4 * step // self.warmup_steps
        return float(first * (self.ratio / first) ** (part / 4))

    def __str__(self) -> str:
        return f"topk({self.ratio:g})"


@dataclasses.dataclass(frozen=True)
class RandomK:
    """Some gradients travel, others in the next step; all ranks know which without being told."""

    ratio: float
    """Which share of them, such as 0.1: every tenth, beginning somewhere else in every step. It is
    rounded to one of n."""

    seed: int = 0
    """Of the order in which their turns come."""

    def __post_init__(self) -> None:
        _check_ratio("randomk", self.ratio)

    def __str__(self) -> str:
        return f"randomk({self.ratio:g})"


DROPPED = (
    "compression={}: what had not travelled of earlier gradients is not in checkpoints; training "
    "goes on without it"
)

Policy = Plain | Blocks | TopK | RandomK


class Compression:
    """What travels: `none`, `fp16`, `bf16`, `int8`, `int4`, `topk(ratio)`, `randomk(ratio)`.

    `int8` and `int4` are blocks of integers with a scale each: 3.9 and 7.7 times fewer bytes than
    float32. They are summed in float32 after they have come.
    """

    none: Any = Plain()
    fp16: Any = Plain("float16")
    bf16 = Plain("bfloat16")
    int8 = Blocks(8)
    int4 = Blocks(4, error_feedback=True)
    topk = TopK
    randomk = RandomK


def _check_ratio(name: str, ratio: Any) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0.0 < ratio <= 1.0:
        raise ValueError(
            f"{name} takes the share of the gradients that travel, greater than 0 and at most 1, "
            f"such as 0.01; got {ratio!r}"
        )


_KINDS = {cls.__name__: cls for cls in (Plain, Blocks, TopK, RandomK)}


def as_config(policy: Policy) -> dict[str, Any]:
    """A policy in words of JSON."""
    return {"kind": type(policy).__name__, **dataclasses.asdict(policy)}


def from_config(config: Any) -> Any:
    """The inverse of `as_config`; anything else as it is."""
    if not isinstance(config, dict):
        return config
    return _KINDS[config["kind"]](**{k: v for k, v in config.items() if k != "kind"})


def keeps_errors(policy: Policy) -> bool:
    """Whether a rank keeps what has not travelled of its gradients."""
    return isinstance(policy, (TopK, RandomK)) or (
        isinstance(policy, Blocks) and policy.error_feedback
    )


def check_gradients(policy: Any, stage: int) -> Policy:
    """Return the policy for gradients, or raise an error that says what to write."""
    if policy in (TopK, RandomK):
        name = "topk" if policy is TopK else "randomk"
        raise ValueError(f"zero.Compression.{name} needs a share: zero.Compression.{name}(0.01)")
    if not isinstance(policy, Policy):
        raise ValueError(
            "compression must be one of zero.Compression.none, .fp16, .bf16, .int8, .int4, "
            ".topk(ratio) and .randomk(ratio), or Horovod's hvd.Compression.none or .fp16; got "
            f"{policy!r}"
        )
    if stage == 0 and not isinstance(policy, Plain):
        raise ValueError(
            f"compression={policy} needs stage 1, 2 or 3: stage 0 is Horovod's allreduce, which "
            "adds numbers on their way and cannot add packed ones. stage=1 keeps gradients and "
            "parameters whole on every rank as well"
        )
    return policy


def check_params(policy: Any, stage: int) -> Policy:
    """Return the policy for parameters, or raise an error that says what to write."""
    if isinstance(policy, (TopK, RandomK)) or policy in (TopK, RandomK):
        raise ValueError(
            "param_compression must be none, fp16, bf16, int8 or int4: an update changes all "
            "parameters, and those that did not travel would be wrong on the other ranks. topk and "
            "randomk are for gradients: compression="
        )
    if not isinstance(policy, Policy):
        raise ValueError(
            "param_compression must be one of zero.Compression.none, .fp16, .bf16, .int8 and .int4;"
            f" got {policy!r}"
        )
    if stage == 0 and policy != Plain():
        raise ValueError(
            f"param_compression={policy} needs stage 1, 2 or 3: at stage 0 every rank updates all "
            "parameters itself, and none travel"
        )
    return policy
