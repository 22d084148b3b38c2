"""What the core's tools ask of this adapter; registered in setup.cfg as an entry point."""

from __future__ import annotations

from collections.abc import Mapping

from zerohvd.checkpoint.offline.consolidate import WriteWeights
from zerohvd.keras.communication import arrays
from zerohvd.keras.optimizer.zeroify import workload

__all__ = ["arrays", "weight_files", "workload"]

# .weights.h5 files are written by the core, with h5py alone.
weight_files: Mapping[str, WriteWeights] = {}
