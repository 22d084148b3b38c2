"""What gradients and variables look like on the wire."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd

from zerohvd.compression import policies
from zerohvd.compression.policies import Plain, Policy, TopK


class Compression(policies.Compression):
    __doc__ = policies.Compression.__doc__

    # Horovod's own: its functions take them too.
    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16


_HOROVODS: dict[Any, Policy] = {
    hvd.Compression.none: Plain(),
    hvd.Compression.fp16: Plain("float16"),
}


def wire_dtype(compression: Any, reduce_dtype: str | None) -> tuple[Any, str | None]:
    """How gradients are packed, and the dtype in which they are sent otherwise: `compression` is
    one way to say `reduce_dtype`."""
    policy = policy_of(compression)
    if not isinstance(policy, Plain) or policy.dtype is None:
        return policy, reduce_dtype
    if reduce_dtype not in (None, policy.dtype):
        raise ValueError(
            f"compression says {policy.dtype} and reduce_dtype says {reduce_dtype}: give one of "
            "them"
        )
    return Plain(), policy.dtype


def policy_of(given: Any) -> Any:
    """The policy behind one of Horovod's objects, or one that stands in a configuration."""
    given = policies.from_config(given)
    if isinstance(given, TopK) and given.warmup_steps:
        raise ValueError(
            "warmup_steps needs a step that changes, and a traced one sends the same in every "
            "step: train the first epochs with another ratio, or without"
        )
    try:
        return _HOROVODS.get(given, given)
    except TypeError:  # it has no hash
        return given
