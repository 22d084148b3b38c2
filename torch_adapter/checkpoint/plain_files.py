"""Plain torch files of weights, read tensor by tensor."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerohvd.checkpoint import ArraySource, CheckpointError, TensorInfo
from zerohvd.layout import Span
from zerohvd.torch.checkpoint.tensors import raw
from zerohvd.torch.communication import arrays

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
