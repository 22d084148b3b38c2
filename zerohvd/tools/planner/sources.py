"""What is to be planned: a function that makes a model, a checkpoint, weights in a file."""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerohvd.checkpoint import Reader
from zerohvd.layout import DTYPE_BYTES, ParamSpec
from zerohvd.planning.workload import Wishes, Workload, from_specs, units_by_name
from zerohvd.tools.adapters import AdapterNotFoundError, load_adapter

# What is imported with a model -> the adapter that knows it.
_FRAMEWORKS = {"torch": "torch", "keras": "keras", "tensorflow": "keras"}
_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_LONGEST_HEADER = 1 << 27


class SourceError(ValueError):
    """There is no model where it was said to be."""


def find(target: str, wishes: Wishes, framework: str | None = None) -> Workload:
    """The model behind "package.module:function", a folder or a file."""
    path = Path(target)
    if path.suffix == ".safetensors" or path.is_dir():
        return _of_specs(path, wishes)
    if ":" not in target:
        raise SourceError(
            f"{target!r} is neither a checkpoint folder, a .safetensors file nor a function such "
            "as mypackage.model:make_model"
        )
    make = load_function(target)
    adapter = _adapter(framework, target)

    def made() -> Any:
        try:
            return make()
        except Exception as error:  # the user's code: its error is what counts, not our calls
            raise SourceError(
                f"{target} failed ({type(error).__name__}: {error}), called without arguments and "
                "without memory for parameters"
            ) from error

    return adapter(made, wishes)


def load_function(target: str) -> Callable[..., Any]:
    """Import "package.module:function", also from the folder this was started in."""
    module, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise SourceError(f"{module!r} of {target!r} cannot be imported: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise SourceError(f"{module!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise SourceError(f"{target!r} must be a function, and is {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def _adapter(framework: str | None, target: str) -> Callable[[Callable[[], Any], Wishes], Workload]:
    used = {adapter for module, adapter in _FRAMEWORKS.items() if module in sys.modules}
    if framework is None and len(used) != 1:
        what = " and ".join(sorted(used)) or "neither torch nor keras"
        raise SourceError(
            f"{target!r} imports {what}: say which one the model is of, with --framework"
        )
    name = framework or next(iter(used))
    try:
        return load_adapter(name).workload
    except (ImportError, AdapterNotFoundError) as error:
        raise SourceError(f"zerohvd.{name} cannot be loaded: {error}") from error


def _of_specs(path: Path, wishes: Wishes) -> Workload:
    specs = _checkpoint(path) if path.is_dir() else _header(path)
    if not specs:
        raise SourceError(f"{str(path)!r} has no parameters")
    count = sum(spec.numel for spec in specs)
    return from_specs(
        specs,
        units_by_name([spec.name for spec in specs]),
        name=f"{path.name}, {count:,} parameters",
        precision=wishes.precision,
        optimizer=wishes.optimizer,
    )


def _checkpoint(path: Path) -> list[ParamSpec]:
    tensors = Reader.open(path).manifest.of_kind("param")
    return [ParamSpec(t.name, tuple(t.shape), t.dtype) for t in tensors]


def _header(path: Path) -> list[ParamSpec]:
    """Names and shapes; values are not read."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST_HEADER + 1
            if length > _LONGEST_HEADER:
                raise ValueError("its header has no valid length")
            header: Mapping[str, Any] = json.loads(file.read(length))
        return [
            ParamSpec(name, tuple(entry["shape"]), _dtype(entry["dtype"]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except OSError as error:
        raise SourceError(f"{str(path)!r} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{str(path)!r} is no safetensors file: {error}") from error


def _dtype(name: str) -> str:
    found = _SAFETENSORS.get(name, name)
    if found not in DTYPE_BYTES:
        raise ValueError(f"it has a tensor of dtype {name}")
    return found
