"""Rows in 16 or 8 bits per value, for serving: what an encoded row is, byte for byte. docs/formats.md has it too.

An encoded row is bytes: of ``bfloat16`` the nearest such values; of ``int8`` FBGEMM's fused 8-bit row, one byte per
value, then the scale and the bias, float32. A value is its byte times the scale, plus the bias. All is little-endian.

FBGEMM adds 1e-8 to the range of a row before it divides by it, so that a row of a small range loses its values. Here
the bias is the least value, and the scale the smallest float32 whose 255 steps reach the largest: no range is too
small. The arithmetic is float64's until the scale and the bytes are rounded, and each row is encoded for itself, so
that the bytes depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import UsageError
from penstock.model.frames import Array, Float32

Bytes = npt.NDArray[np.uint8]

# The key in the metadata of an Arrow schema that names the encoding of its rows. Without it, they are float32.
ROWS_KEY = b"penstock.rows"

_EXPONENT = 0x7F800000
_FLOATS_AT_ONCE = 1 << 18
_STEPS = 255  # of the bytes of a row
_TAIL_BYTES = 8  # scale and bias


@dataclass(frozen=True)
class RowEncoding:
    """How rows are stored.

    name : of ``--rows``
    value_bytes, tail_bytes : of each value of a row, and of what follows them
    encode : float32 (n, dim) → uint8 (n, row_bytes), of float32 the same rows
    decode : the other way round; a row that is not finite may be NaN throughout
    """

    name: str
    value_bytes: int
    tail_bytes: int
    encode: Callable[[Float32], Array]
    decode: Callable[[Array], Float32]

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of a row."""
        return dim * self.value_bytes + self.tail_bytes

    def width(self, dim: int) -> int:
        """Return the second dimension of arrays of rows: floats of float32, else bytes."""
        return dim if self is FLOAT32 else self.row_bytes(dim)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of rows as NumPy has them: bfloat16 as such, int8 as bytes."""
        if self is not BFLOAT16:
            return np.dtype(np.float32 if self is FLOAT32 else np.uint8)
        from ml_dtypes import bfloat16

        dtype: np.dtype[Any] = np.dtype(bfloat16)
        return dtype

    def as_values(self, rows: Array) -> Array:
        """Return rows in their ``dtype``."""
        return np.ascontiguousarray(rows).view(self.dtype)


def encoding_of(name: Any, argument: str = "rows") -> RowEncoding:
    """Return an encoding by name. Raises UsageError. argument : for the message"""
    if not isinstance(name, str) or name not in ENCODINGS:
        raise UsageError(f"{argument}: expected {', '.join(ENCODINGS)}, got {name!r:.50}")
    return ENCODINGS[name]


def nearest(values: Float32) -> Float32:
    """Round float32 to the nearest bfloat16 values, ties to even; return them as float32."""
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    special = (bits & np.uint32(_EXPONENT)) == _EXPONENT
    truncated = np.where(np.isnan(values), (bits | np.uint32(0x00400000)), bits) & np.uint32(0xFFFF0000)
    out: Float32 = np.where(special, truncated, rounded).astype(np.uint32).view(np.float32)
    return out


def _halves(rows: Float32) -> Bytes:
    upper = (nearest(np.ascontiguousarray(rows)).view(np.uint32) >> np.uint32(16)).astype("<u2")
    encoded: Bytes = upper.view(np.uint8)
    return encoded


def _from_halves(encoded: Array) -> Float32:
    upper = np.ascontiguousarray(encoded).view("<u2").astype(np.uint32)
    rows: Float32 = (upper << np.uint32(16)).view(np.float32)
    return rows


def _fused(rows: Float32) -> Bytes:
    num_rows, dim = rows.shape
    encoded = np.empty((num_rows, dim + _TAIL_BYTES), np.uint8)
    for block in _blocks(num_rows, dim):
        _fuse(rows[block], encoded[block])
    return encoded


def _fuse(rows: Float32, encoded: Bytes) -> None:
    """encoded : OUT"""
    dim = rows.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        least = rows.min(axis=1) + np.float32(0)  # never -0.0, which may be the least of several zeros or not
        span = np.abs(rows.max(axis=1).astype(np.float64) - least)  # -0.0 - 0.0 is -0.0
        scale = (span / _STEPS).astype(np.float32)
        too_short = scale.astype(np.float64) * _STEPS < span  # exact: 24 bits times 8
        scale = np.where(too_short, np.nextafter(scale, np.float32(np.inf)), scale)
        # Whoever decodes may round the product or not.
        last = scale.astype(np.float64) * _STEPS + least
        is_finite = np.isfinite(np.float32(_STEPS) * scale + least) & (np.abs(last) <= np.finfo(np.float32).max)
        steps = rows - least[:, None].astype(np.float64)
        steps /= np.where(scale > 0, scale, np.float32(1))[:, None]
        steps[~is_finite] = 0
    encoded[:, :dim] = np.rint(steps, out=steps)
    tail = np.where(is_finite, (scale, least), np.float32(np.nan)).T.astype("<f4")
    encoded[:, dim:] = np.ascontiguousarray(tail).view(np.uint8)


def _from_fused(encoded: Array) -> Float32:
    num_rows, dim = len(encoded), encoded.shape[1] - _TAIL_BYTES
    rows = np.empty((num_rows, dim), np.float32)
    scale, bias = np.ascontiguousarray(encoded[:, dim:]).view("<f4").T.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for block in _blocks(num_rows, dim):
            np.multiply(encoded[block, :dim], scale[block, None], out=rows[block])
            rows[block] += bias[block, None]
    return rows


def _blocks(num_rows: int, dim: int) -> Iterator[slice]:
    """Yield slices of rows whose temporary arrays stay in a cache."""
    at_once = max(1, _FLOATS_AT_ONCE // dim)
    for first in range(0, num_rows, at_once):
        yield slice(first, first + at_once)


FLOAT32 = RowEncoding("float32", 4, 0, lambda rows: rows, lambda rows: rows)
BFLOAT16 = RowEncoding("bfloat16", 2, 0, _halves, _from_halves)
INT8 = RowEncoding("int8", 1, _TAIL_BYTES, _fused, _from_fused)
ENCODINGS = {encoding.name: encoding for encoding in (FLOAT32, BFLOAT16, INT8)}
