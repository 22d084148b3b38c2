"""From a checkpoint to one plain file of weights, tensor by tensor."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zerohvd.checkpoint import format as fmt
from zerohvd.checkpoint.errors import CheckpointError, cannot, reading
from zerohvd.checkpoint.manifest import TensorInfo, names_in
from zerohvd.checkpoint.offline.weights_h5 import open_h5py
from zerohvd.checkpoint.reader import Reader

Each = Callable[[int], None]
# Writes tensors by name into a file, given what yields the bytes of one, block by block. Two names
# may have the same tensor.
Blocks = Callable[[TensorInfo], Iterator[memoryview]]
WriteWeights = Callable[[Path, Mapping[str, TensorInfo], Blocks], None]
Writer = Callable[[Path, Reader, dict[str, TensorInfo], Each], None]
SUFFIXES = (".safetensors", ".weights.h5")


def weights(reader: Reader, *, masters: bool = False) -> dict[str, TensorInfo]:
    """The model in a checkpoint: its parameters and buffers, by name.

    Args:
        reader: The checkpoint.
        masters: Take float32 masters in the place of 16-bit parameters, where there are any.
    """
    found = {t.name: t for t in reader.manifest.of_kind("param", "buffer")}
    if masters:
        found.update({t.name: t for t in reader.manifest.of_kind("master")})
    return found


def consolidate(
    path: Path,
    out: Path,
    *,
    masters: bool = False,
    each: Each = lambda nbytes: None,
    others: Mapping[str, WriteWeights] | None = None,
) -> None:
    """Write the weights of a checkpoint into one file; its suffix says which kind.

    At most one tensor is in memory at a time. `out` appears when it is complete.

    Args:
        path: The checkpoint.
        out: A .safetensors file, Keras' .weights.h5, or a file of another kind in `others`.
        masters: As for `weights`.
        each: Told how many bytes have been written since it was last called.
        others: Suffix -> writer, of files that only a framework can write.
    """
    write = _writer(out, others or {})
    reader = Reader.open(path)
    reader.check_files()
    found = weights(reader, masters=masters)
    draft = out.with_name(f"{out.name}.partial-{secrets.token_hex(8)}")
    try:
        with _removed_on_error(draft):
            _write(write, draft, reader, found, each)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(draft, out)
    except OSError as error:
        raise cannot("write", out, error) from error


def _write(
    write: Writer, draft: Path, reader: Reader, found: dict[str, TensorInfo], each: Each
) -> None:
    """Errors of the file that is written stay what they are; all others name the checkpoint."""
    failed: list[OSError] = []
    with reading(reader.folder):
        try:
            write(draft, reader, found, each)
        except OSError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _writer(
    out: Path, others: Mapping[str, WriteWeights]
) -> Writer:
    if out.name.endswith(".safetensors"):
        return _write_safetensors
    if out.name.endswith(".weights.h5"):
        return _write_keras
    if out.suffix in others:
        return _with_aliases(others[out.suffix])
    known = ", ".join([*SUFFIXES, *others])
    raise ValueError(f"{out} must end with one of {known}: it says what to write")


def _with_aliases(
    write: WriteWeights,
) -> Writer:
    def adapted(path: Path, reader: Reader, found: dict[str, TensorInfo], each: Each) -> None:
        aliases = names_in(reader.manifest.state, "aliases")
        named = {**found, **{alias: found[n] for alias, n in aliases.items() if n in found}}
        write(path, named, lambda info: blocks(reader, info, each))

    return adapted


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def blocks(reader: Reader, info: TensorInfo, each: Each) -> Iterator[memoryview]:
    """The bytes of a tensor in order, checked; a block is valid until the next one."""
    for block in reader.blocks(info.key):
        yield block
        each(len(block))


def _write_safetensors(
    path: Path, reader: Reader, found: Mapping[str, TensorInfo], each: Each
) -> None:
    ordered = sorted(found.items(), key=lambda item: -item[1].itemsize)
    # "pt" and "tf" are what libraries of models look for.
    about = {"format": "tf" if reader.manifest.framework == "keras" else "pt"}
    places = names_in(reader.manifest.state, "weights_h5")
    if places:
        unplaced = list(reader.manifest.state.get("unplaced", []))
        about[fmt.ABOUT] = json.dumps({"weights_h5": places, "unplaced": unplaced})
    with path.open("wb") as file:
        file.write(fmt.header([(name, t.dtype, t.shape) for name, t in ordered], about))
        for _, info in ordered:
            for block in blocks(reader, info, each):
                file.write(block)


def _write_keras(path: Path, reader: Reader, found: Mapping[str, TensorInfo], each: Each) -> None:
    places = names_in(reader.manifest.state, "weights_h5")
    if not places:
        raise CheckpointError(
            "only a checkpoint that zerohvd.keras has saved knows where Keras looks for a weight "
            "in a .weights.h5 file: write a .safetensors file"
        )
    h5py = open_h5py()
    with h5py.File(path, "w") as file:
        for name, place in places.items():
            if name not in found:
                raise ValueError(f"state.weights_h5 names {name!r}, which is not stored")
            info = found[name]
            data = np.empty(info.nbytes, np.uint8)
            at = 0
            for block in blocks(reader, info, each):
                data[at : at + len(block)] = block
                at += len(block)
            value = data.view(_numpy_dtype(info.dtype)).reshape(info.shape)
            stored = file.create_dataset(place, data=value)
            if info.dtype == "bfloat16":
                stored.attrs["dtype"] = "bfloat16"


def _numpy_dtype(dtype: str) -> Any:
    if dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return getattr(importlib.import_module("ml_dtypes"), dtype)
    return np.dtype(dtype)
