"""What gradients and parameters look like on the wire."""

from __future__ import annotations

from typing import Any, NamedTuple

import horovod.torch as hvd
import torch

from zerohvd.compression import policies
from zerohvd.compression.policies import Plain, Policy
from zerohvd.config import ZeroConfig
from zerohvd.torch.communication import arrays


class Compression(policies.Compression):
    __doc__ = policies.Compression.__doc__

    # Horovod's own: its functions take them too.
    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16


_HOROVODS: dict[Any, Policy] = {
    hvd.Compression.none: Plain(),
    hvd.Compression.fp16: Plain("float16"),
}


class Wires(NamedTuple):
    """What travels in the place of gradients, and of parameters."""

    grads: Policy = Plain()
    params: Policy = Plain()

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that gradients are converted to; None: they stay as they are."""
        if not isinstance(self.grads, Plain) or self.grads.dtype is None:
            return None
        return arrays.dtype_of(self.grads.dtype)


def wires_of(config: ZeroConfig) -> Wires:
    return Wires(config.wire, config.param_compression)


def policy_of(given: Any) -> Any:
    """The policy behind one of Horovod's objects; anything else as it is."""
    try:
        return _HOROVODS.get(given, given)
    except TypeError:  # it has no hash
        return given
