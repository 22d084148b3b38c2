"""Threads of this rank: its share of the cores, unless the user has said otherwise."""

from __future__ import annotations

import os

import horovod.tensorflow as hvd
import tensorflow as tf

from zerohvd import cores


def settle() -> None:
    """For when the adapter is imported: what the user sets afterwards holds."""
    threading = tf.config.threading
    decided = os.environ.get("TF_NUM_INTRAOP_THREADS")
    # TensorFlow refuses once it runs anything: then it keeps the threads that it has.
    cores.settle(
        None if decided or threading.get_intra_op_parallelism_threads() else 0,
        threading.set_intra_op_parallelism_threads,
        "TF_NUM_INTRAOP_THREADS",
        is_started=hvd.is_initialized(),
    )
