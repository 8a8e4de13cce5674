"""Stochastic rounding of float32 to bfloat16, with the same bits from numpy and jax.numpy.

An update is often smaller than half the distance between two bfloat16 values; rounding to nearest would lose it every
time. Stochastic rounding rounds each element up with the probability that preserves the mean. A hash of (key, id,
element) decides, not a random stream, so the result is independent of where a row lies and what else is updated. The
id of a row in a dynamic table is its key.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any  # of the namespace xp

EXPONENT = 0x7F800000
# The largest finite bfloat16, as the bits of a float32.
LARGEST = 0x7F7F0000


@dataclass(frozen=True)
class RowIds:
    """The mapping from a device's rows to the ids that key their rounding: the inverse of ``Layout.locate``.

    among : as in Layout
    """

    vocabulary_size: int
    num_shards: int
    mod: bool
    shards_per_device: int
    rows_per_shard: int
    among: tuple[int, int] = (0, 1)

    def ids(self, xp: ModuleType, device: Array, rows: Array) -> Array:
        """Return the ids, modulo 2**32, of a device's rows: uint32."""
        first, stride = self.among
        return self.numbers(xp, device, rows).astype(xp.uint32) * np.uint32(stride) + np.uint32(first & 0xFFFFFFFF)

    def numbers(self, xp: ModuleType, device: Array, rows: Array) -> Array:
        """Return the rows of the table that a device's rows are."""
        shards = device * self.shards_per_device + rows // self.rows_per_shard
        inside = rows % self.rows_per_shard
        if self.mod:
            return inside * self.num_shards + shards
        quotient, remainder = divmod(self.vocabulary_size, self.num_shards)
        return shards * quotient + xp.minimum(shards, remainder) + inside


def key_of(table: str, step: int, application: int) -> np.uint32:
    """Return the rounding key of a table in one step. application : the number of the optimizer's application in it"""
    digest = hashlib.blake2b(struct.pack("<qq", step, application) + table.encode(), digest_size=4).digest()
    return np.uint32(int.from_bytes(digest, "little"))


def words_of(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return keys as words for ``stochastic``: their lower 32 bits, changed by the upper ones unless those are 0."""
    bits = keys.view(np.uint64)
    lower, upper = bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)
    words: npt.NDArray[np.uint32] = lower ^ _mixed(upper)
    return words


def stochastic(xp: ModuleType, bits: Array, key: Array, ids: Array, elements: Array) -> Array:
    """Round float32 values stochastically to bfloat16; return them as float32 bits whose lower half is 0.

    bits, ids, elements : uint32 of one shape; key : uint32 scalar
    Finite values stay finite, infinities stay infinite, and NaNs stay NaNs.
    """
    chance = _mixed(_mixed(ids ^ key) + elements * xp.uint32(0x9E3779B9)) >> xp.uint32(16)
    upper = xp.uint32(0xFFFF0000)
    size, sign = bits & xp.uint32(0x7FFFFFFF), bits & xp.uint32(0x80000000)
    rounded = xp.minimum((size + chance) & upper, xp.uint32(LARGEST))
    # A NaN's payload may be in the lower half alone; setting the quiet bit keeps it a NaN.
    special = (size & upper) | xp.where(size > EXPONENT, xp.uint32(0x00400000), xp.uint32(0))
    return sign | xp.where(size >= EXPONENT, special, rounded)


def _mixed(bits: Array) -> Array:
    """Mix bits so that each result bit depends on every input bit (MurmurHash3's finalizer)."""
    number = bits.dtype.type
    bits = (bits ^ (bits >> number(16))) * number(0x85EBCA6B)
    bits = (bits ^ (bits >> number(13))) * number(0xC2B2AE35)
    return bits ^ (bits >> number(16))
