"""Event files that TensorBoard reads, written without it.

TensorBoard's own writer loads TensorFlow where that is installed, into the process of a PyTorch
job. A file of scalars is small: records of the TFRecord format (a length, its checksum, the data,
its checksum), each an `Event` protocol buffer with a wall time, a step and (tag, value) pairs.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reversed
_MASK = 0xA282EAD8


class TensorBoardSink:
    """Scalars in a folder, to look at with `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.zerohvd"
        self._path = path / name
        self._write(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def log(self, record: dict[str, Any]) -> None:
        values = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _float(2, float(value)))
            for tag, value in record.items()
            if isinstance(value, (int, float)) and tag not in ("step", "wall_time")
        )
        event = _double(1, record["wall_time"]) + _varint(2, record["step"]) + _bytes(5, values)
        self._write(event)

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        with self._path.open("ab") as file:
            file.write(length + _checksum(length) + data + _checksum(data))


# -- protocol buffers ------------------------------------------------------------------------------


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _double(field: int, value: float) -> bytes:
    return _number(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _number(field << 3 | 5) + struct.pack("<f", value)


# -- checksums -------------------------------------------------------------------------------------


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ _POLYNOMIAL if crc & 1 else crc >> 1
        table.append(crc)
    return table


_TABLE = _table()


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of the TFRecord format."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)
