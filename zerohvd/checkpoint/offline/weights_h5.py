"""Keras' own files of weights (HDF5), read range by range without Keras."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zerohvd.checkpoint import ArraySource, CheckpointError, TensorInfo
from zerohvd.layout import Span


def open_h5py() -> Any:
    """Return the module h5py, which comes with Keras and is needed for nothing else."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise CheckpointError(f"a .weights.h5 file needs h5py: {error}") from error


def open_weights(path: Path, places: Mapping[str, str]) -> ArraySource:
    """A .weights.h5 or .keras file as if it were a checkpoint of nothing but parameters.

    Args:
        path: The file.
        places: Name of a variable -> where the file has it.
    """
    h5py = open_h5py()
    try:
        file = h5py.File(_inside(path) if path.suffix == ".keras" else path, "r")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    names = {place: name for name, place in places.items()}
    found: dict[str, TensorInfo] = {}
    stored_as: dict[str, Any] = {}

    def note(place: str, stored: Any) -> None:
        # Everything but what belongs to the optimizer: what the model lacks has to be named.
        if isinstance(stored, h5py.Dataset) and not place.startswith("optimizer/"):
            key = f"param/{names.get(place, place)}"
            found[key] = TensorInfo(key, _dtype(stored), tuple(stored.shape), ())
            stored_as[key] = stored

    file.visititems(note)

    def fetch(info: TensorInfo, span: Span) -> npt.NDArray[Any]:
        return _range(stored_as[info.key], span, info.dtype)

    return ArraySource(found, fetch)


def _inside(path: Path) -> Any:
    """The weights in a .keras file, which is an archive that is not compressed."""
    return zipfile.ZipFile(path).open("model.weights.h5")


def _dtype(stored: Any) -> str:
    return str(stored.attrs.get("dtype", stored.dtype.name))


def _range(stored: Any, span: Span, dtype: str) -> npt.NDArray[Any]:
    """Elements of the flattened dataset, by way of the rows that hold them."""
    if not stored.shape:
        return np.ascontiguousarray(stored[()]).reshape(-1)
    row = int(np.prod(stored.shape[1:], dtype=np.int64))
    first, last = span.start // max(1, row), -(-span.stop // max(1, row))
    rows = np.ascontiguousarray(stored[first:last]).reshape(-1)
    part = rows[span.start - first * row : span.stop - first * row]
    if dtype == "bfloat16" and part.dtype.itemsize != 2:
        return np.asarray(part, importlib.import_module("ml_dtypes").bfloat16)
    return np.ascontiguousarray(part)
