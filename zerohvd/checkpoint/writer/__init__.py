"""Writing a checkpoint: who may, shards by all ranks, then the manifest, then one rename."""

from zerohvd.checkpoint.writer.claim import remove_dead_claim
from zerohvd.checkpoint.writer.draft import (
    Draft,
    SavePlan,
    begin,
    remove,
    remove_leftover,
    save,
)

__all__ = [
    "Draft",
    "SavePlan",
    "begin",
    "remove",
    "remove_dead_claim",
    "remove_leftover",
    "save",
]
