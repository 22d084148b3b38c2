"""ZeRO for Keras 3 on TensorFlow under Horovod: `import zerohvd.keras as zero`."""

if __name__ != "zerohvd.keras":
    raise ImportError(f"import zerohvd.keras, not {__name__}: a second copy would share no state")

import os

from zerohvd.launchers import allow_single_process
from zerohvd.versions import require_keras

require_keras()
allow_single_process(os.environ)

from zerohvd.checkpoint import CheckpointError, CorruptCheckpointError  # noqa: E402
from zerohvd.errors import DisagreementError, ShardedStateError, ZeroError  # noqa: E402
from zerohvd.keras import callbacks, keras_hooks  # noqa: E402
from zerohvd.keras.checkpoint import CheckpointManager, load, save  # noqa: E402
from zerohvd.keras.data import shard_dataset  # noqa: E402
from zerohvd.keras.keras_hooks import verbose  # noqa: E402
from zerohvd.keras.optimizer import DistributedOptimizer  # noqa: E402
from zerohvd.keras.reports import communication_report, memory_report  # noqa: E402
from zerohvd.keras.saving import save_model  # noqa: E402
from zerohvd.keras.state import plain_optimizer  # noqa: E402
from zerohvd.keras.weighting import weight  # noqa: E402
from zerohvd.keras.zeroify import zeroify  # noqa: E402

# Before any optimizer is made: load_model makes one while it is compiling.
keras_hooks.install()

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CorruptCheckpointError",
    "DisagreementError",
    "DistributedOptimizer",
    "ShardedStateError",
    "ZeroError",
    "callbacks",
    "communication_report",
    "load",
    "memory_report",
    "plain_optimizer",
    "save",
    "save_model",
    "shard_dataset",
    "verbose",
    "weight",
    "zeroify",
]
