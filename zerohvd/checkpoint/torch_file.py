"""A state_dict file as torch.save makes it, written tensor by tensor and without torch.

Such a file is a zip archive: one record per storage, and a description in torch's own use of the
pickle format, which is spelled out here. Nothing is pickled, and nothing is ever unpickled.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from zerohvd.checkpoint.manifest import TensorInfo

_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
_ALIGN = 64  # so that torch.load(mmap=True) finds tensors where vector units like them


def write(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    blocks: Callable[[TensorInfo], Iterator[memoryview]],
) -> None:
    """Write a state_dict.

    Args:
        path: The file.
        tensors: By name; one tensor under two names is stored once.
        blocks: Gives the bytes of a tensor, block by block.
    """
    keys = {info.key: str(i) for i, info in enumerate(dict.fromkeys(tensors.values()))}
    by_key = {info.key: info for info in tensors.values()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _record(archive, "data.pkl", [memoryview(_describe(tensors, keys))], 0)
        _record(archive, ".format_version", [memoryview(b"1")], 0)
        _record(archive, "byteorder", [memoryview(b"little")], 0)
        for key, number in keys.items():
            info = by_key[key]
            _record(archive, f"data/{number}", blocks(info), info.nbytes)
        _record(archive, "version", [memoryview(b"3\n")], 0)


def _record(
    archive: zipfile.ZipFile,
    name: str,
    blocks: Iterator[memoryview] | list[memoryview],
    nbytes: int,
) -> None:
    info = zipfile.ZipInfo(f"archive/{name}")
    large = nbytes >= 1 << 31
    assert archive.fp is not None
    # Behind the fixed header come the name and the extra fields; the last of them is padding.
    start = archive.fp.tell() + 30 + len(info.filename) + (20 if large else 0) + 4
    padding = -start % _ALIGN
    info.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=large) as record:
        for block in blocks:
            record.write(block)


# -- torch's description, opcode by opcode (pickle protocol 2) -----------------------------------


def _describe(tensors: Mapping[str, TensorInfo], keys: Mapping[str, str]) -> bytes:
    out = [b"\x80\x02", b"}", b"("]
    for name, info in tensors.items():
        if info.dtype not in _STORAGES:
            raise ValueError(
                f"{name!r} is {info.dtype}, which torch files hold in another way: write a "
                ".safetensors file"
            )
        out += [_text(name), _tensor(info, keys[info.key])]
    return b"".join([*out, b"u."])


def _tensor(info: TensorInfo, key: str) -> bytes:
    strides: list[int] = []
    step = 1
    for d in reversed(info.shape):
        strides.insert(0, step)
        step *= max(1, d)
    storage = (
        b"(" + _text("storage") + _global("torch", _STORAGES[info.dtype]) + _text(key)
        + _text("cpu") + _int(info.numel) + b"tQ"
    )  # fmt: skip
    hooks = _global("collections", "OrderedDict") + b")R"
    sizes = b"(" + b"".join(map(_int, info.shape)) + b"t"
    steps = b"(" + b"".join(map(_int, strides)) + b"t"
    rebuild = _global("torch._utils", "_rebuild_tensor_v2")
    return rebuild + b"(" + storage + _int(0) + sizes + steps + b"\x89" + hooks + b"tR"


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _int(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()
