"""Plain torch files of weights, read tensor by tensor."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerohvd.checkpoint import ArraySource, CheckpointError, TensorInfo
from zerohvd.checkpoint.offline.consolidate import Blocks
from zerohvd.layout import Span
from zerohvd.torch.checkpoint.tensors import from_array, raw
from zerohvd.torch.communication import arrays

_ALIGNMENT = 64  # more than any dtype needs
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Where training scripts put the model's weights in a larger dict.
_INSIDE = ("state_dict", "model_state_dict", "model")


def open_torch_file(path: Path) -> ArraySource:
    """A state_dict that torch.save has written. Its tensors stay on disk until they are asked for.

    Only tensors are read (`weights_only`): no code of the file runs.
    """
    try:
        # A file of the old format cannot be mapped; it is read whole.
        mapped = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"cannot read {path}: {reason}") from error
    tensors = {name: t for name, t in _find(loaded, path).items() if isinstance(t, torch.Tensor)}
    infos = {
        f"param/{name}": TensorInfo(f"param/{name}", arrays.dtype_name(t), tuple(t.shape), ())
        for name, t in tensors.items()
    }

    def fetch(info: TensorInfo, span: Span) -> np.ndarray:
        tensor = tensors[info.name]
        if not tensor.is_contiguous():
            return raw(tensor.reshape(-1)[span.start : span.stop])
        return raw(tensor.view(-1)[span.start : span.stop])

    return ArraySource(infos, fetch)


def write_state_dict(path: Path, tensors: Mapping[str, TensorInfo], blocks: Blocks) -> None:
    """Write a file that torch.load reads; tied tensors are stored once.

    torch.save takes whole tensors, so these are views of a temporary file beside `path`, as large
    as the model: the pages of its mapping can leave memory at any time.
    """
    distinct = {info.key: info for info in tensors.values()}
    with tempfile.TemporaryFile(dir=path.parent) as scratch:
        at: dict[str, int] = {}
        for info in distinct.values():
            scratch.write(bytes(-scratch.tell() % _ALIGNMENT))
            at[info.key] = scratch.tell()
            for block in blocks(info):
                scratch.write(block)
        scratch.flush()
        stored = {key: _mapped(scratch, info, at[key]) for key, info in distinct.items()}
        torch.save({name: stored[info.key] for name, info in tensors.items()}, path)


def _mapped(file: Any, info: TensorInfo, offset: int) -> torch.Tensor:
    if not info.nbytes:
        return from_array(info, np.empty(0, np.uint8))  # nothing to map
    # Copy-on-write, because torch warns of memory that it must not write.
    return from_array(info, np.memmap(file, np.uint8, "c", offset, info.nbytes))


def _find(loaded: Any, path: Path) -> Mapping[str, Any]:
    for key in _INSIDE:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
            break
    if not isinstance(loaded, Mapping) or not any(
        isinstance(v, torch.Tensor) for v in loaded.values()
    ):
        raise CheckpointError(f"{path} holds no state_dict: a dict of names and tensors")
    return loaded
