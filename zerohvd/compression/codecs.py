"""Packing numbers into bytes, and back, with the array operations of any framework.

A codec sees 1-D float32 arrays and gives 1-D arrays of uint8, scales and indices among them. How
many bytes depends on the number of elements alone: every rank knows what the others send.

A number that is not finite stays so, for loss scaling to see: it makes its whole block NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

from zerohvd.compression.policies import Blocks, Plain, Policy, RandomK, TopK

# 8 bits: 4 / (1 + 2/128) = 3.94 times fewer bytes than float32; 4 bits: 4 / (0.5 + 2/128) = 7.76.
BLOCK = 128

# Scales are bfloat16: as wide a range as float32. A block whose largest number is so small that its
# scale would be denormal becomes zeros: the inverse would overflow, and some processors flush.
LEAST_SCALE = 2.0**-126


class PackArrays(Protocol):
    """The operations that packing needs of a framework; a module will do."""

    def rows(self, x: Any, width: int) -> Any:
        """A 1-D array as rows."""

    def flat(self, x: Any) -> Any:
        """An array as 1-D."""

    def largest(self, rows: Any) -> Any:
        """The largest absolute value of each row of float32; NaN where one is NaN."""

    def inverse(self, scales: Any, least: float) -> Any:
        """1 / scales, and 0 where a scale is less than `least` or NaN."""

    def encode(self, rows: Any, factors: Any, offset: float) -> Any:
        """`rows * factors + offset`, a factor for each row, without fractions: as uint8."""

    def decode(self, codes: Any, factors: Any, offset: float) -> Any:
        """`(codes - offset) * factors`, a factor for each row: as float32."""

    def join_halves(self, codes: Any) -> Any:
        """Rows of 4-bit codes, the second half of a row in the upper bits of the first."""

    def split_halves(self, codes: Any) -> Any:
        """The inverse of `join_halves`."""

    def to_bytes(self, x: Any, dtype: str) -> Any:
        """A 1-D array, converted to `dtype`, as uint8."""

    def from_bytes(self, data: Any, dtype: str) -> Any:
        """The inverse: an array of `dtype`."""

    def float32(self, x: Any) -> Any: ...

    def pad(self, x: Any, length: int) -> Any:
        """A 1-D array with zeros behind it, `length` long."""

    def concat(self, parts: list[Any]) -> Any: ...

    def top(self, x: Any, count: int) -> Any:
        """The places, as int32, of the `count` largest absolute values; NaN counts as large."""

    def take(self, x: Any, places: Any) -> Any: ...

    def put(self, values: Any, places: Any, length: int) -> Any:
        """A 1-D array of zeros, `length` long, with these values at these places."""

    def column(self, rows: Any, index: Any) -> Any: ...

    def with_column(self, values: Any, index: Any, width: int) -> Any:
        """Rows of zeros, with these values as the column `index`; 1-D."""


class Codec(Protocol):
    """One way to pack.

    Attributes:
        keeps_own: A rank's own part of its gradients, which does not travel, is not packed either.
    """

    keeps_own: bool

    def nbytes(self, count: int) -> int:
        """How many bytes so many elements become; an even number."""

    def pack(self, ops: PackArrays, x: Any, turn: Any) -> Any:
        """1-D float32 -> 1-D uint8. `turn` is the number of the step."""

    def unpack(self, ops: PackArrays, data: Any, count: int, turn: Any) -> Any:
        """The inverse, to 1-D float32."""


@dataclasses.dataclass(frozen=True)
class CastCodec:
    """16-bit floats."""

    dtype: str
    keeps_own = True

    def nbytes(self, count: int) -> int:
        return 2 * count

    def pack(self, ops: PackArrays, x: Any, turn: Any) -> Any:
        return ops.to_bytes(x, self.dtype)

    def unpack(self, ops: PackArrays, data: Any, count: int, turn: Any) -> Any:
        return ops.float32(ops.from_bytes(data, self.dtype))


@dataclasses.dataclass(frozen=True)
class BlockCodec:
    """Integers of `bits` bits, a scale for each block: all scales first, then the integers.

    The integers are stored with an offset, so that they are positive: rounding is cutting off then.
    """

    bits: int
    keeps_own = True

    @property
    def _limit(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def nbytes(self, count: int) -> int:
        tail = count % BLOCK
        codes = (count - tail) * self.bits // 8 + (tail + self._odd(tail)) * self.bits // 8
        size = 2 * -(-count // BLOCK) + codes
        return size + size % 2

    def _odd(self, tail: int) -> int:
        return tail % 2 if self.bits == 4 else 0

    def pack(self, ops: PackArrays, x: Any, turn: Any) -> Any:
        scales, codes = [], []
        for rows in self._rows(ops, x):
            packed = ops.to_bytes(ops.largest(rows) * (1.0 / self._limit), "bfloat16")
            scale = ops.float32(ops.from_bytes(packed, "bfloat16"))
            made = ops.encode(rows, ops.inverse(scale, LEAST_SCALE), self._limit + 1.5)
            scales.append(packed)
            codes.append(ops.flat(ops.join_halves(made) if self.bits == 4 else made))
        data = ops.concat([*scales, *codes])
        return ops.pad(data, self.nbytes(x.shape[0]))

    def _rows(self, ops: PackArrays, x: Any) -> list[Any]:
        """The full blocks, and the last one, which is shorter; one of them if that is all."""
        count = x.shape[0]
        tail = count % BLOCK
        found = []
        if count > tail:
            found.append(ops.rows(x[: count - tail] if tail else x, BLOCK))
        if tail:
            width = tail + self._odd(tail)
            found.append(ops.rows(ops.pad(x[count - tail :], width), width))
        return found

    def unpack(self, ops: PackArrays, data: Any, count: int, turn: Any) -> Any:
        tail, blocks = count % BLOCK, -(-count // BLOCK)
        scales = ops.float32(ops.from_bytes(data[: 2 * blocks], "bfloat16"))
        at, full = 2 * blocks, count // BLOCK
        found = []
        for start, stop, width in ((0, full, BLOCK), (full, blocks, tail + self._odd(tail))):
            if start == stop:
                continue
            held = width * self.bits // 8
            codes = ops.rows(data[at : at + (stop - start) * held], held)
            at += (stop - start) * held
            codes = ops.split_halves(codes) if self.bits == 4 else codes
            found.append(ops.flat(ops.decode(codes, scales[start:stop], self._limit + 1.0)))
        values = found[0] if len(found) == 1 else ops.concat(found)
        return values[:count] if self._odd(tail) else values


@dataclasses.dataclass(frozen=True)
class TopKCodec:
    """The largest elements, as float32, then their places, as int32."""

    ratio: float
    keeps_own = False

    def _count(self, count: int) -> int:
        return min(count, math.ceil(self.ratio * count))

    def nbytes(self, count: int) -> int:
        return 8 * self._count(count)

    def pack(self, ops: PackArrays, x: Any, turn: Any) -> Any:
        places = ops.top(x, self._count(x.shape[0]))
        return ops.concat(
            [ops.to_bytes(ops.take(x, places), "float32"), ops.to_bytes(places, "int32")]
        )

    def unpack(self, ops: PackArrays, data: Any, count: int, turn: Any) -> Any:
        half = 4 * self._count(count)
        values = ops.from_bytes(data[:half], "float32")
        return ops.put(values, ops.from_bytes(data[half:], "int32"), count)


@dataclasses.dataclass(frozen=True)
class RandomKCodec:
    """Every n-th element, as float32. `turn` says which one comes first, so no place travels.

    The turns are a permutation: every element travels once in n steps.
    """

    ratio: float
    seed: int
    keeps_own = False

    @property
    def _stride(self) -> int:
        return max(1, round(1.0 / self.ratio))

    def nbytes(self, count: int) -> int:
        return 4 * -(-count // self._stride)

    def _column(self, turn: Any) -> Any:
        stride = self._stride
        # Near the golden ratio: neighbours come far apart. Coprime, or some would never come.
        step = max(1, round(0.618 * stride))
        while math.gcd(step, stride) > 1:
            step += 1
        return (turn * step + self.seed * 7919) % stride

    def pack(self, ops: PackArrays, x: Any, turn: Any) -> Any:
        count = x.shape[0]
        rows = ops.rows(ops.pad(x, self.nbytes(count) // 4 * self._stride), self._stride)
        # NaN if any number is not finite, also one that does not travel now; else 0.
        overflow = ops.largest(ops.rows(x, count)) * 0.0
        return ops.to_bytes(ops.column(rows, self._column(turn)) + overflow, "float32")

    def unpack(self, ops: PackArrays, data: Any, count: int, turn: Any) -> Any:
        values = ops.from_bytes(data, "float32")
        return ops.with_column(values, self._column(turn), self._stride)[:count]


def codec_of(policy: Policy, step: int = 0) -> Codec | None:
    """What packs by a policy, in a step of a warm-up; None: nothing is packed."""
    if isinstance(policy, Blocks):
        return BlockCodec(policy.bits)
    if isinstance(policy, TopK):
        return TopKCodec(policy.ratio_at(step))
    if isinstance(policy, RandomK):
        return RandomKCodec(policy.ratio, policy.seed)
    assert isinstance(policy, Plain)
    return None if policy.dtype is None else CastCodec(policy.dtype)
