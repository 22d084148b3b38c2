"""ZeRO for Keras 3 on TensorFlow under Horovod: `import zerohvd.keras as zero`."""

if __name__ != "zerohvd.keras":
    raise ImportError(f"import zerohvd.keras, not {__name__}: a second copy would share no state")

import os

from zerohvd.launchers import allow_single_process
from zerohvd.rank_count import warn_of_lonely_ranks
from zerohvd.versions import require_keras

require_keras()
allow_single_process(os.environ)
warn_of_lonely_ranks(os.environ)

# Horovod's own, so that `import zerohvd.keras as hvd` replaces `import horovod.tensorflow.keras as
# hvd`, whose optimizer and callbacks do not work on Keras 3.
from horovod.tensorflow import (  # noqa: E402
    Average,
    ProcessSet,
    Sum,
    add_process_set,
    allgather,
    allgather_object,
    allreduce,
    broadcast,
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)

from zerohvd.checkpoint import CheckpointError, CorruptCheckpointError  # noqa: E402
from zerohvd.errors import (  # noqa: E402
    DisagreementError,
    ShardedStateError,
    WaitTimeoutError,
    ZeroError,
)
from zerohvd.keras import callbacks  # noqa: E402
from zerohvd.keras.checkpoint import elastic  # noqa: E402
from zerohvd.keras.checkpoint.api import CheckpointManager, load, save  # noqa: E402
from zerohvd.keras.checkpoint.preempting import preemption  # noqa: E402
from zerohvd.keras.checkpoint.whole_model import save_model  # noqa: E402
from zerohvd.keras.communication.packed.compression import Compression  # noqa: E402
from zerohvd.keras.communication.threads import settle  # noqa: E402
from zerohvd.keras.data import shard_dataset  # noqa: E402
from zerohvd.keras.fit import patches  # noqa: E402
from zerohvd.keras.fit.patches import verbose  # noqa: E402
from zerohvd.keras.optimizer.distributed import DistributedOptimizer  # noqa: E402
from zerohvd.keras.optimizer.report import communication_report, memory_report  # noqa: E402
from zerohvd.keras.optimizer.state import plain_optimizer  # noqa: E402
from zerohvd.keras.optimizer.weighting import weight  # noqa: E402
from zerohvd.keras.optimizer.zeroify import plan, zeroify  # noqa: E402
from zerohvd.keras.stage3.gathered import gathered  # noqa: E402
from zerohvd.keras.stage3.initial.deferred import deferred_init  # noqa: E402

# Before any optimizer is made: load_model makes one while it is compiling.
patches.install()
settle()

__all__ = [
    "Average",
    "CheckpointError",
    "CheckpointManager",
    "Compression",
    "CorruptCheckpointError",
    "DisagreementError",
    "DistributedOptimizer",
    "ProcessSet",
    "ShardedStateError",
    "Sum",
    "WaitTimeoutError",
    "ZeroError",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_object",
    "callbacks",
    "communication_report",
    "cross_rank",
    "cross_size",
    "deferred_init",
    "elastic",
    "gathered",
    "global_process_set",
    "init",
    "is_initialized",
    "load",
    "local_rank",
    "local_size",
    "memory_report",
    "plain_optimizer",
    "plan",
    "preemption",
    "rank",
    "remove_process_set",
    "save",
    "save_model",
    "shard_dataset",
    "shutdown",
    "size",
    "verbose",
    "weight",
    "zeroify",
]
