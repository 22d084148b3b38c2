"""Checkpoints that any number of ranks can write and any other number can read.

A checkpoint is a folder: one safetensors file per rank that wrote, and a manifest that says which
range of which tensor lies where. Adapters hand in entries and ask for ranges, both by parameter
name; nothing here knows a framework or a stage.
"""

from zerohvd.checkpoint.entries import Content, Entry, Want, share_out, whole
from zerohvd.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    together,
)
from zerohvd.checkpoint.manifest import Manifest, TensorInfo, is_complete, read_manifest
from zerohvd.checkpoint.reader import ArraySource, Reader, Source, open_safetensors
from zerohvd.checkpoint.values.tree import Array, encode
from zerohvd.checkpoint.writer import SavePlan, save

__all__ = [
    "Array",
    "ArraySource",
    "CheckpointError",
    "CheckpointMismatchError",
    "Content",
    "CorruptCheckpointError",
    "Entry",
    "Manifest",
    "Reader",
    "SavePlan",
    "Source",
    "TensorInfo",
    "Want",
    "encode",
    "is_complete",
    "open_safetensors",
    "read_manifest",
    "save",
    "share_out",
    "together",
    "whole",
]
