"""zerohvd: ZeRO for Horovod.

`import zerohvd.torch as zero` for PyTorch, `import zerohvd.keras as zero` for Keras 3 on
TensorFlow. This package is what both share: pure bookkeeping that imports neither framework.
"""

from zerohvd._version import __version__
from zerohvd.config import ZeroConfig
from zerohvd.errors import (
    DisagreementError,
    NonFiniteError,
    ShardedStateError,
    WaitTimeoutError,
    ZeroError,
)
from zerohvd.layout import Layout, ParamSpec, build_layout

__all__ = [
    "DisagreementError",
    "Layout",
    "NonFiniteError",
    "ParamSpec",
    "ShardedStateError",
    "WaitTimeoutError",
    "ZeroConfig",
    "ZeroError",
    "__version__",
    "build_layout",
]
