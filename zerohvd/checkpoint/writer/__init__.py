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
from zerohvd.checkpoint.writer.fragments import fragment_of, manifest_of
from zerohvd.checkpoint.writer.shard import write_shard

__all__ = [
    "Draft",
    "SavePlan",
    "begin",
    "fragment_of",
    "manifest_of",
    "remove",
    "remove_dead_claim",
    "remove_leftover",
    "save",
    "write_shard",
]
